"""What systemd is told of this process, through the socket that it names in `NOTIFY_SOCKET`: that it is ready, what it
does, that it stops, and, where the unit asks for it, that it is still alive.

Without that variable nothing is sent. A supervisor that does not listen never stops the server.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Mapping

_log = logging.getLogger("strata.serve")


class Supervisor:
    """The process that started this one, if it wants to hear of it. For one thread."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        variables = os.environ if environment is None else environment
        address = variables.get("NOTIFY_SOCKET", "")
        # An abstract socket, which lies in no folder, is spelled with an @ for its first byte, a zero.
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._every_s = _watchdog_s(variables)
        self._last = time.monotonic()

    def ready(self, status: str) -> None:
        """The server answers requests; `status` is what `systemctl status` shows."""
        self._send(f"READY=1\nSTATUS={status}")

    def stopping(self, status: str) -> None:
        """The server was asked to stop, and does."""
        self._send(f"STOPPING=1\nSTATUS={status}")

    def alive(self, is_well: Callable[[], bool]) -> None:
        """To be called often. As often as the unit's WatchdogSec asks for, says that all is well if it is; a server of
        which that is not said is restarted."""
        if self._every_s and time.monotonic() - self._last >= self._every_s and is_well():
            self._last = time.monotonic()
            self._send("WATCHDOG=1")

    def _send(self, message: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as notify:
                notify.setblocking(False)
                notify.sendto(message.encode(), self._address)
        except OSError as error:
            _log.warning("NOTIFY_SOCKET: the supervisor was not told %r: %s", message, error)


def _watchdog_s(variables: Mapping[str, str]) -> float:
    """Seconds between two signs of life, half of what the unit allows; 0 if it asks for none of this process."""
    allowed, process = variables.get("WATCHDOG_USEC", ""), variables.get("WATCHDOG_PID", "")
    if not allowed.isdecimal() or process not in ("", str(os.getpid())):
        return 0.0
    return int(allowed) / 2e6
