"""What systemd hears through `NOTIFY_SOCKET`: a socket stands in for it."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_process import Run

from strata.serve.supervisor import Supervisor


class FakeSystemd:
    """Listens at `address`, which may be a path or, with an @, an abstract name."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + address[1:] if address.startswith("@") else address)
        self._socket.settimeout(20)

    def hear(self) -> dict[str, str]:
        """The next message."""
        lines = self._socket.recv(4096).decode().splitlines()
        return dict(line.split("=", 1) for line in lines)

    def hear_all(self) -> list[dict[str, str]]:
        """Everything that was said and not heard yet."""
        self._socket.settimeout(0)
        heard = []
        try:
            while True:
                heard.append(self.hear())
        except BlockingIOError:
            return heard

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[FakeSystemd]:
    fake = FakeSystemd(str(tmp_path / "notify"))
    yield fake
    fake.close()


def test_a_server_says_ready_alive_and_stopping(run: Run, systemd: FakeSystemd) -> None:
    program = run(NOTIFY_SOCKET=systemd.address, WATCHDOG_USEC="400000")
    ready = systemd.hear()
    assert ready["READY"] == "1" and ready["STATUS"] == f"serving fake-model on {program.url}"
    assert systemd.hear() == {"WATCHDOG": "1"}
    program.process.send_signal(signal.SIGTERM)
    assert program.exit_code() == 0
    said = systemd.hear_all()
    assert said[-1]["STOPPING"] == "1" and all(each == {"WATCHDOG": "1"} for each in said[:-1])


def test_nobody_is_told_that_a_dead_engine_is_alive(systemd: FakeSystemd) -> None:
    supervisor = Supervisor({"NOTIFY_SOCKET": systemd.address, "WATCHDOG_USEC": "1"})
    supervisor.alive(lambda: False)
    assert systemd.hear_all() == []
    supervisor.alive(lambda: True)
    assert systemd.hear_all() == [{"WATCHDOG": "1"}]


def test_a_watchdog_for_another_process_is_not_fed(systemd: FakeSystemd) -> None:
    variables = {"NOTIFY_SOCKET": systemd.address, "WATCHDOG_USEC": "1", "WATCHDOG_PID": str(os.getpid() + 1)}
    Supervisor(variables).alive(lambda: True)
    Supervisor({"NOTIFY_SOCKET": systemd.address}).alive(lambda: True)
    assert systemd.hear_all() == []


def test_an_abstract_address() -> None:
    systemd = FakeSystemd(f"@strata-test-{os.getpid()}")
    Supervisor({"NOTIFY_SOCKET": systemd.address}).ready("serving")
    assert systemd.hear() == {"READY": "1", "STATUS": "serving"}
    systemd.close()


def test_a_supervisor_that_is_gone_stops_nobody(
    systemd: FakeSystemd, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Supervisor({"NOTIFY_SOCKET": str(tmp_path / "nobody")}).stopping("finishing")
    assert "NOTIFY_SOCKET: the supervisor was not told" in caplog.text
    Supervisor({}).ready("nobody asked")
    assert systemd.hear_all() == []
