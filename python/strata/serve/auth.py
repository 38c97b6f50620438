"""With `--api-key`, every route but `/health` asks for it as a bearer token."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from strata.serve.errors import ApiError

_OPEN_PATHS = frozenset({"/health"})


class BearerAuth:
    """ASGI middleware that answers 401 to requests without the key."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._expected = f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in _OPEN_PATHS:
            given = Headers(scope=scope).get("authorization", "").encode()
            if not hmac.compare_digest(given, self._expected):
                error = ApiError(
                    401,
                    "the API key is missing or wrong; send `Authorization: Bearer KEY`",
                    "invalid_api_key",
                )
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)
