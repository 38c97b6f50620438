"""Before any route: a request under a name that is not the server's, of a page elsewhere, without its key or with a
body that is no JSON is answered here, and nothing of it is read.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from strata.config import ServerOptions
from strata.serve.auth import KEY_ID, Access, Keyring, access_of
from strata.serve.errors import ApiError
from strata.serve.origins import Hosts, Origins

_NO_BODY = (b"", b"0")


class AccessControl:
    """ASGI middleware. Leaves the name of the request's key in `scope["state"]`."""

    def __init__(self, app: ASGIApp, options: ServerOptions) -> None:
        self._app = app
        self._keys = Keyring(options)
        self._hosts = Hosts(options)
        self._origins = Origins(options)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                key_id = self._check(scope)
            except ApiError as error:
                await error.response()(scope, receive, send)
                return
            scope.setdefault("state", {})[KEY_ID] = key_id
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> str:
        """The name of the request's key. Raises ApiError."""
        headers: dict[bytes, bytes] = {}
        for name, value in scope["headers"]:
            if name == b"host":
                self._hosts.check(value)
            headers[name] = value
        self._origins.check(scope["method"], headers)
        authorization = headers.get(b"authorization", b"")
        key_id = self._keys.key_id(access_of(scope["path"]), authorization)
        if key_id is None and self._keys.key_id(Access.USER, authorization):
            raise ApiError(
                401,
                "this key is good for the routes of users alone; for this route send one of --admin-api-key",
                "invalid_api_key",
            )
        if key_id is None:
            raise ApiError(
                401, "the API key is missing or wrong; send `Authorization: Bearer KEY`", "invalid_api_key"
            )
        has_body = headers.get(b"content-length", b"") not in _NO_BODY or b"transfer-encoding" in headers
        if has_body and not _is_json(headers.get(b"content-type", b"")):
            # A page may send a form anywhere without being asked for its origin first; never JSON.
            raise ApiError(415, "the body must be JSON, sent with `Content-Type: application/json`")
        return key_id


def _is_json(content_type: bytes) -> bool:
    return content_type.partition(b";")[0].strip().lower() == b"application/json"
