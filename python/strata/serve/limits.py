"""What one request, and what one key, may take of the server: bodies are read within bounds before any route sees them.

How long a client may take is watched where its bytes arrive (`connections.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from strata.config import ServerOptions, format_size
from strata.serve.auth import KEY_ID, Access, access_of
from strata.serve.errors import ApiError

_BODIES_HELD = 64
"""Bodies of the largest size that may be read at once."""
_DISCARDED = 4
"""How many times the largest body is read and thrown away before the connection is cut: a client that has sent its body
reads the answer, one that is cut off while sending does not."""
_DISCARD_S = 5.0


class Limits:
    """ASGI middleware behind access control."""

    def __init__(self, app: ASGIApp, options: ServerOptions) -> None:
        self._app = app
        self._most_bytes = options.max_body_bytes
        self._most_requests = options.max_concurrency_per_key
        self._held_bytes = 0
        self._under_way: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif self._most_requests and scope["method"] == "POST" and access_of(scope["path"]) is Access.USER:
            await self._counted(scope, receive, send)
        else:
            await self._with_body(scope, receive, send)

    async def _counted(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers 429 for one request of a key too many."""
        key = scope["state"][KEY_ID]
        if self._under_way[key] >= self._most_requests:
            error = ApiError(
                429,
                f"{self._under_way[key]} requests with this key are under way, which is as many as "
                "--max-concurrency-per-key allows; send it again when one has ended",
                "too_many_requests",
            )
            await error.response()(scope, receive, send)
            return
        self._under_way[key] += 1
        try:
            await self._with_body(scope, receive, send)
        finally:
            self._under_way[key] -= 1
            if not self._under_way[key]:
                del self._under_way[key]

    async def _with_body(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Reads the body, then lets the request go on."""
        giving: Receive | None = receive
        length = announced_length(scope)
        if length != 0:
            giving = await self._take_in(length, receive, send)
        if giving is not None:
            await self._app(scope, giving, send)

    async def _take_in(self, length: int | None, receive: Receive, send: Send) -> Receive | None:
        """What gives the whole body to the app, which lets go of it long before its answer ends: only while it is read
        does it count. None if the client left or was refused."""
        body = bytearray()
        try:
            whole = await self._read(length, receive, body)
            return _replay(bytes(body), receive) if whole else None
        except ApiError as error:
            await _refuse(error, receive, send, _DISCARDED * self._most_bytes)
            return None
        finally:
            self._held_bytes -= len(body)

    async def _read(self, length: int | None, receive: Receive, body: bytearray) -> bool:
        """Fills `body`. False if the client left; raises ApiError 413 or 503."""
        if length is not None:
            self._check(length, length)
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return False
            piece = message.get("body", b"")
            self._check(len(body) + len(piece), len(piece))
            body += piece
            self._held_bytes += len(piece)
            if not message.get("more_body", False):
                return True

    def _check(self, size: int, more: int) -> None:
        if size > self._most_bytes:
            raise ApiError(
                413,
                f"the body has more than {format_size(self._most_bytes)}, which is --max-body-bytes; send less",
                "body_too_large",
            )
        if self._held_bytes + more > _BODIES_HELD * self._most_bytes:
            raise ApiError(
                503,
                f"{format_size(self._held_bytes)} of other requests' bodies are being read; send this one again later",
                "bodies_full",
            )


def announced_length(scope: Scope) -> int | None:
    """Bytes of the body to come; None for one whose end alone will tell."""
    length = 0
    for name, value in scope["headers"]:
        if name == b"transfer-encoding":
            return None
        if name == b"content-length":
            length = int(value)  # the HTTP parser lets nothing else pass
    return length


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the whole body at once, then what the connection says."""
    left: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def give() -> Message:
        return left.pop() if left else await receive()

    return give


async def _refuse(error: ApiError, receive: Receive, send: Send, most_bytes: int) -> None:
    """Answers, then hears the client out for a while: who is cut off while sending sees no answer."""
    response = error.response()
    headers = [*response.raw_headers, (b"connection", b"close")]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    with contextlib.suppress(asyncio.TimeoutError):  # it had its time
        await asyncio.wait_for(_discard(receive, most_bytes), _DISCARD_S)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _discard(receive: Callable[[], Awaitable[Message]], most_bytes: int) -> None:
    while most_bytes > 0:
        message = await receive()
        if message["type"] != "http.request" or not message.get("more_body", False):
            return
        most_bytes -= len(message.get("body", b""))
