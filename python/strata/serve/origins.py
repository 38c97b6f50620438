"""No web page reaches the server behind its user's back: not from another origin, and not under a name that only leads
here (DNS rebinding). A page's browser says which name and which origin it is; other clients send no origin.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping
from functools import lru_cache
from urllib.parse import urlsplit

from strata.config import ServerOptions
from strata.serve.binding import is_loopback
from strata.serve.errors import ApiError

_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}
_ANY = "*"


class Hosts:
    """The names under which the server may be asked.

    On loopback those are this machine's own; elsewhere also the name it was bound to, the machine's, and every numeric
    address, which no other page can have for its own. `--allowed-hosts` adds to them.
    """

    def __init__(self, options: ServerOptions) -> None:
        self._loopback_only = is_loopback(options)
        names = {"localhost", options.host, *options.allowed_hosts}
        if not self._loopback_only:
            names.add(socket.gethostname())
        self._names = {name.lower().rstrip(".") for name in names if name}
        self._any = _ANY in self._names

    def check(self, host: bytes) -> None:
        """Raises ApiError 403 for a `Host` that is none of them."""
        if self._any or self._may_be(_name_in(host)):
            return
        shown = host.decode("latin-1")[:100]
        raise ApiError(
            403,
            f"the server is not asked as {shown!r} (header Host); if that name is meant to lead here, start the "
            "server with --allowed-hosts NAME",
            "host_not_allowed",
        )

    def _may_be(self, name: str | None) -> bool:
        if name is None:
            return False
        if name in self._names:
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return address.is_loopback or not self._loopback_only


class Origins:
    """The origins whose pages may ask: the server's own, and those of `--allowed-origins`."""

    def __init__(self, options: ServerOptions) -> None:
        self._allowed = {origin.lower() for origin in options.allowed_origins}

    def check(self, method: str, headers: Mapping[bytes, bytes]) -> None:
        """Raises ApiError 403 for a request of a page elsewhere. Old browsers tell no origin with a form; what they
        say of the site does instead. A link that leads here only reads."""
        origin = headers.get(b"origin", b"").decode("latin-1").lower()
        if origin:
            fine = origin in self._allowed or _is_own(origin, headers.get(b"host", b""))
        else:
            site = headers.get(b"sec-fetch-site", b"")
            fine = method in _SAFE_METHODS or site in (b"", b"same-origin", b"none")
        if fine or _ANY in self._allowed:
            return
        raise ApiError(
            403,
            f"a page of {origin[:100] or 'another site'} may not ask here; if it is meant to, start the server with "
            "--allowed-origins ORIGIN",
            "origin_not_allowed",
        )


@lru_cache(maxsize=256)
def _name_in(host: bytes) -> str | None:
    """The name in a `Host` header, without its port."""
    try:
        return (urlsplit("//" + host.decode("ascii")).hostname or "").rstrip(".") or None
    except ValueError:
        return None


def _is_own(origin: str, host: bytes) -> bool:
    """Whether an origin is the one that the request itself was sent to."""
    scheme, _, place = origin.partition("://")
    port = _DEFAULT_PORTS.get(scheme)
    if port is None:
        return False
    return place.removesuffix(port) == host.decode("latin-1").lower().removesuffix(port)
