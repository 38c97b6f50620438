"""One client cannot keep the server from the others: there are only so many connections, and each has only so long to
send a request, or to read what waits for it.

uvicorn has no such bounds of its own; these are put around its protocol, whichever parser that uses.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import struct
import time
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from strata.config import ServerOptions
from strata.serve.errors import ApiError

_log = logging.getLogger("strata.serve")

_KEEP_ALIVE_S = 65
_LEAST_BYTES_PER_S = 16 << 10
"""A body that arrives faster than this may take longer than `--client-timeout-s`."""
_OWN_FILES = 512
"""Files that the server opens beside its connections."""
_CUT_FACTOR = 2
"""Connections beyond this many times the limit are cut without an answer."""

_NO_LINGER = struct.pack("ii", 1, 0)

if TYPE_CHECKING:
    from uvicorn.protocols.http.h11_impl import H11Protocol as _Protocol
else:
    _Protocol = AutoHTTPProtocol


def http_config(app: ASGIApp, options: ServerOptions, graceful_s: int) -> uvicorn.Config:
    """How uvicorn serves an app. `graceful_s`: how long a stop lets requests go on."""

    class Connection(BoundedConnection):
        limits = options

    return uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=graceful_s,
    )


class BoundedConnection(_Protocol):
    """A connection whose client must keep up."""

    limits: ServerOptions

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._sending: asyncio.TimerHandle | None = None
        self._reading: asyncio.TimerHandle | None = None
        self._since = 0.0
        self._received = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        most = self.limits.max_connections
        if len(self.connections) > most * _CUT_FACTOR:
            transport.abort()
            return
        if len(self.connections) > most:
            self.app = _too_many_connections
        self._await_client()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._owes():
            _cancel(self._sending)
            self._sending = None
        elif self._sending is None:
            self._await_client()
        self._received += len(data)

    def connection_lost(self, exc: Exception | None) -> None:
        _cancel(self._sending)
        _cancel(self._reading)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reading = self.loop.call_later(self.limits.client_timeout_s, self._drop_reader)

    def resume_writing(self) -> None:
        _cancel(self._reading)
        super().resume_writing()

    def _owes(self) -> bool:
        """Whether the client has begun a request and not ended it. Bytes that come after an answer begin the next."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def _await_client(self) -> None:
        self._since, self._received = time.monotonic(), 0
        self._sending = self.loop.call_later(self.limits.client_timeout_s, self._drop_sender)

    def _drop_sender(self) -> None:
        waited = time.monotonic() - self._since
        earned = self._received / _LEAST_BYTES_PER_S
        if earned > waited:
            self._sending = self.loop.call_later(self.limits.client_timeout_s, self._drop_sender)
            return
        if self.cycle is None or not self.cycle.response_started:
            self.transport.write(_too_slow(waited))
        _log.debug("a client took %.1f s and had not sent its request: cut", waited)
        self.transport.close()

    def _drop_reader(self) -> None:
        _log.info(
            "a client read nothing for %.1f s while its answer waited: cut, and its request is aborted",
            self.limits.client_timeout_s,
        )
        # The kernel drops what it still has to send, or it would go on offering that.
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        self.transport.abort()


def allow_open_files(options: ServerOptions) -> None:
    """Raises this process's limit of open files to what so many connections need, as far as it may."""
    wanted = options.max_connections * _CUT_FACTOR + _OWN_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < options.max_connections + _OWN_FILES:
        _log.warning(
            "--max-connections %d needs more open files than the %d allowed here; raise `ulimit -n` or lower it",
            options.max_connections,
            allowed,
        )


async def _too_many_connections(scope: Scope, receive: Receive, send: Send) -> None:
    error = ApiError(
        503,
        "the server has as many connections as --max-connections allows; try again",
        "too_many_connections",
    )
    response = error.response()
    response.headers["connection"] = "close"
    await response(scope, receive, send)


def _too_slow(seconds: float) -> bytes:
    """The answer of a connection whose request is not there to be answered."""
    error = ApiError(
        408,
        f"the request was not complete after {seconds:.0f} s, and --client-timeout-s is over; send it again",
        "request_timeout",
    )
    body = bytes(error.response().body)
    head = (
        f"HTTP/1.1 408 Request Timeout\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    )
    return head.encode() + b"connection: close\r\n\r\n" + body


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
