"""One client cannot keep the server from the others: there are only so many connections, and each has only so long to
send a request, or to read what waits for it.

uvicorn has no such bounds of its own; these are put around its protocol.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import struct
import time
from http import HTTPStatus
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from strata.config import ServerOptions
from strata.serve.errors import ApiError

_log = logging.getLogger("strata.serve")

_KEEP_ALIVE_S = 65
_LEAST_BYTES_PER_S = 16 << 10
"""A body that arrives faster than this may take longer than `--client-timeout-s`."""
_LONGEST_CREDIT = 2
"""How many times `--client-timeout-s` a body may earn that way at most."""
_MOST_HEAD_BYTES = 64 << 10
"""Bytes of one request that may come without any of its body among them: its line and headers, or trailers."""
_OWN_FILES = 512
"""Files that the server opens beside its connections."""
_CUT_FACTOR = 2
"""Connections beyond this many times the limit are cut without an answer."""

_NO_LINGER = struct.pack("ii", 1, 0)


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


class BoundedConnection(HttpToolsProtocol):
    """A connection whose client must keep up."""

    limits: ServerOptions

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._sending: asyncio.TimerHandle | None = None
        self._reading: asyncio.TimerHandle | None = None
        self._since = 0.0
        self._received = 0
        """Bytes of a body since then: what else is sent earns no time."""
        self._head = 0
        """Bytes since the last head was complete or the last piece of a body came."""

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
        self._head += len(data)
        super().data_received(data)
        if self._head > _MOST_HEAD_BYTES:
            self._refuse_head()
            return
        if not self._owes():
            _cancel(self._sending)
            self._sending = None
        elif self._sending is None:
            self._await_client()

    def on_headers_complete(self) -> None:
        self._head = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._head = 0
        self._received += len(body)
        super().on_body(body)

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
        most = _LONGEST_CREDIT * self.limits.client_timeout_s
        earned = min(self._received / _LEAST_BYTES_PER_S, most)
        if earned > waited:
            self._sending = self.loop.call_later(self.limits.client_timeout_s, self._drop_sender)
            return
        # A request that came behind another one cannot be answered in the middle of that one's answer.
        if self.cycle is None or not (self.cycle.response_started or self.pipeline):
            self.transport.write(_too_slow(waited))
        _log.debug("a client took %.1f s and had not sent its request: cut", waited)
        self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        """uvicorn's own would fill the log at anybody's wish; the request is answered as if it asked for none."""
        _log.debug("a client asked for another protocol")

    def _refuse_head(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.write(_TOO_LONG)
        _log.debug("a client sent more than %d bytes of headers: cut", _MOST_HEAD_BYTES)
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
    sentence = (
        f"the request was not complete after {seconds:.0f} s, and --client-timeout-s is over; send it again"
    )
    return _last_answer(ApiError(408, sentence, "request_timeout"))


def _last_answer(error: ApiError) -> bytes:
    body = bytes(error.response().body)
    head = (
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body


_TOO_LONG = _last_answer(
    ApiError(
        431,
        f"the request's line and headers have more than {_MOST_HEAD_BYTES >> 10} KiB; send less",
        "headers_too_large",
    )
)


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
