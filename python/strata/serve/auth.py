"""Who may ask what: `--api-key` opens the routes of users, `--admin-api-key` all of them.

Keys are compared in constant time and written nowhere. A route that is not listed here is an operator's, so that a new
one is shut until somebody opens it.
"""

from __future__ import annotations

import hashlib
import hmac
from enum import Enum

from starlette.types import Scope

from strata.config import ServerOptions

KEY_ID = "strata_key_id"
"""Where in `scope["state"]` the name of the key that a request was sent with stands; empty without a key."""


class Access(Enum):
    """Whose a route is."""

    ANYONE = "anyone"
    USER = "user"
    ADMIN = "admin"


_ANYONE = frozenset({"/", "/favicon.ico", "/health", "/ping", "/livez", "/ready", "/readyz"})
_ANYONE_BELOW = ("/page/",)
_USER = frozenset(
    {
        "/metrics",
        "/tokenize",
        "/detokenize",
        "/tokenizer_info",
        "/version",
        "/load",
        "/openapi.json",
    }
)
_USER_BELOW = ("/v1/",)


def access_of(path: str) -> Access:
    """Whose a path is. `/metrics` is a user's, since it counts and names nobody: what scrapes it needs no key that can
    flush."""
    if path in _ANYONE or path.startswith(_ANYONE_BELOW):
        return Access.ANYONE
    return Access.USER if path in _USER or path.startswith(_USER_BELOW) else Access.ADMIN


class Keyring:
    """The keys, as digests."""

    def __init__(self, options: ServerOptions) -> None:
        self._users = [_digest(key) for key in options.api_key]
        self._admins = [_digest(key) for key in options.admin_api_key]

    def key_id(self, access: Access, authorization: bytes) -> str | None:
        """The name of the key that opens such a route, empty if it needs none; None if it stays shut."""
        admins = self._admins or self._users
        keys = admins if access is Access.ADMIN else self._users
        if access is Access.ANYONE or not keys:
            return ""
        scheme, _, key = authorization.partition(b" ")
        given = _digest(key.strip())
        known = keys if access is Access.ADMIN else [*keys, *self._admins]
        # Every key is compared, so that the time tells nothing, not even which one it was.
        found = [hmac.compare_digest(given, each) for each in known]
        return given.hex() if scheme.lower() == b"bearer" and any(found) else None


def salt_of(scope: Scope, options: ServerOptions, cache_salt: str) -> str:
    """The namespace of a request's pages: its own salt, and with `--salt-per-key` its key's before that, so that no
    salt a client can send leads to another key's pages."""
    if not options.salt_per_key:
        return cache_salt
    return f"{scope['state'][KEY_ID]}:{cache_salt}"


def _digest(key: str | bytes) -> bytes:
    """Of equal length for all keys, and no plain hash of them."""
    content = key.encode() if isinstance(key, str) else key
    return hmac.new(b"strata key", content, hashlib.sha256).digest()[:16]
