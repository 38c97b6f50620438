"""The listening socket: taken before the model is loaded, and never open to others by accident."""

from __future__ import annotations

import errno
import ipaddress
import socket
from contextlib import closing
from functools import lru_cache

from strata.config import ServerOptions
from strata.errors import ConfigError
from strata.serve.port_owner import owner_of

_BACKLOG = 2048
_SEND_BUFFER_BYTES = 256 << 10
"""What the kernel keeps of an answer that its client does not read."""
_PORTS_TRIED = 100


def bind(options: ServerOptions) -> socket.socket:
    """A socket bound to the address that the options name, not yet listening.

    Raises ConfigError for an address that others can reach and no key guards, a port in use, an unknown host.
    """
    family, address = _resolve(options.host, options.port)
    _check_exposure(options, address[0])
    # asyncio turns Nagle's algorithm off only where TCP is named; with it an answer can wait 40 ms.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Connections inherit both: what a client does not read is bounded, and so is how long it is kept.
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(options.client_timeout_s * 1000))
    try:
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise _refusal(options, error) from error
    return bound


def listen(bound: socket.socket, options: ServerOptions) -> None:
    """Lets clients in. Raises ConfigError when another process began to listen there since `bind`."""
    try:
        bound.listen(_BACKLOG)
    except OSError as error:
        raise _refusal(options, error) from error


def url_of(bound: socket.socket) -> str:
    """The URL that a client on this machine uses; an address that means "all" is shown as localhost."""
    host, port = bound.getsockname()[:2]
    address = ipaddress.ip_address(host)
    if address.is_unspecified:
        return f"http://localhost:{port}"
    return f"http://[{host}]:{port}" if address.version == 6 else f"http://{host}:{port}"


def place_of(bound: socket.socket) -> str:
    """That URL for people, who should know where else the server can be reached."""
    unspecified = ipaddress.ip_address(bound.getsockname()[0]).is_unspecified
    return url_of(bound) + (" (and every other address of this machine)" if unspecified else "")


def is_loopback(options: ServerOptions) -> bool:
    """Whether only this machine can reach the address that the options name. Raises ConfigError."""
    return _is_loopback(options.host)


@lru_cache(maxsize=16)
def _is_loopback(host: str) -> bool:
    """Looked up once: that names cannot be looked up later changes nothing."""
    return ipaddress.ip_address(_resolve(host, 0)[1][0]).is_loopback


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, tuple[str, int]]:
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise ConfigError(
            f"--host {host} is not known here ({error.strerror}); give one, e.g. 127.0.0.1"
        ) from error
    family, _, _, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return family, (str(address[0]), int(address[1]))


def _check_exposure(options: ServerOptions, address: str) -> None:
    if ipaddress.ip_address(address).is_loopback or options.api_key or options.insecure:
        return
    raise ConfigError(
        f"--host {options.host} can be reached from elsewhere, and everyone there could use and flush the "
        "cache; set --api-key KEY (better in the variable STRATA_API_KEY), or --insecure if that is meant, "
        "or use --host 127.0.0.1"
    )


def _refusal(options: ServerOptions, error: OSError) -> ConfigError:
    place = f"--port {options.port} on {options.host}"
    if error.errno == errno.EADDRINUSE:
        family, (address, port) = _resolve(options.host, options.port)
        owner = owner_of(address, port) or "another process"
        free = _free_port(family, address, port)
        remedy = f"take a port that is free now: --port {free}" if free else "take another --port"
        return ConfigError(f"{place} is in use by {owner}; stop that, or {remedy}")
    if error.errno == errno.EACCES:
        return ConfigError(
            f"{place} may not be used by this user; take a port from 1024 up, e.g. --port 8000"
        )
    return ConfigError(
        f"{place} cannot be used: {error.strerror}; give an address of this machine, e.g. --host 127.0.0.1"
    )


def _free_port(family: socket.AddressFamily, address: str, taken: int) -> int | None:
    """A port that was free a moment ago: one of the next ones, or else any."""
    for port in (*range(taken + 1, min(taken + _PORTS_TRIED, 65536)), 0):
        with closing(socket.socket(family, socket.SOCK_STREAM)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, port))
                probe.listen(1)
            except OSError:
                continue  # in use as well: the next one is tried
            return int(probe.getsockname()[1])
    return None
