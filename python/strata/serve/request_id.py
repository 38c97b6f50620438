"""Every request has an id: the client's `x-request-id` if it is a sane one, else a new one. It goes back in the header,
names the answer, and stands in the log, so that a client's log and the server's can be laid side by side.
"""

from __future__ import annotations

import re
import uuid
from contextvars import ContextVar

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "x-request-id"
_SANE = re.compile(r"[A-Za-z0-9._:@/+=-]{1,128}")
_current: ContextVar[str] = ContextVar("strata_request_id", default="")


def current_request_id() -> str:
    """The id of the request that is being answered; empty outside of one."""
    return _current.get()


class RequestIds:
    """ASGI middleware that gives each HTTP request its id."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER, "")
        request_id = given if _SANE.fullmatch(given) else uuid.uuid4().hex
        _current.set(request_id)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)
