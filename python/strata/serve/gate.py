"""The address answers from the moment it is taken: that the server starts, until there is an app to answer.

A supervisor sees a live process that is not ready, a client gets 503 with `Retry-After`; nobody waits for an answer.
Before the address is given up, each answer ends its connection, so that no client counts on one.
"""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from strata.serve.errors import ApiError

_STARTING = "the server is starting: it loads the model"


class Gate:
    """An ASGI app that passes requests on to another one, once that is there."""

    def __init__(self) -> None:
        self._app: ASGIApp | None = None
        self._leaving = False

    def open(self, app: ASGIApp) -> None:
        """From now on `app` answers. May be called from any thread."""
        self._app = app

    def leave(self) -> None:
        """From now on no connection outlives its answer. May be called from any thread."""
        self._leaving = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_last(message: Message) -> None:
            if self._leaving and message["type"] == "http.response.start":
                MutableHeaders(scope=message)["connection"] = "close"
            await send(message)

        if self._app is not None:
            await self._app(scope, receive, send_last)
        elif scope["type"] == "http":
            await _answer(scope["path"])(scope, receive, send)


def _answer(path: str) -> Response:
    """What is said of a server that starts, in the form of the routes that will be there."""
    if path == "/livez":
        return JSONResponse({"live": True, "problems": []})
    if path == "/health":
        return JSONResponse({"status": "starting", "ready": False, "problems": []}, 503)
    if path in ("/ready", "/readyz"):
        return JSONResponse({"ready": False, "reason": _STARTING}, 503)
    return ApiError(503, f"{_STARTING}; send the request again in a while", "starting").response()
