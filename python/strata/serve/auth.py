"""With `--api-key`, every route but those of health and the page's files asks for it as a bearer token."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from strata.serve.errors import ApiError

_OPEN_PATHS = frozenset({"/health", "/livez", "/ready", "/readyz", "/"})
_OPEN_FOLDER = "/page/"
"""The page's own files hold no data: it asks for the key itself."""


class BearerAuth:
    """ASGI middleware that answers 401 to requests without the key."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._expected = f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] == "http" and path not in _OPEN_PATHS and not path.startswith(_OPEN_FOLDER):
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
