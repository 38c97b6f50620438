"""Which addresses may be served, and what is said of those that may not."""

from __future__ import annotations

import socket

import pytest

from strata.config import ServerOptions
from strata.errors import ConfigError
from strata.serve.binding import bind, url_of


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.0.2"])
def test_loopback_needs_no_key(host: str) -> None:
    with bind(ServerOptions(host=host, port=0)) as bound:
        assert url_of(bound).startswith("http://127.0.0.")


@pytest.mark.parametrize("host", ["0.0.0.0", ""])
def test_an_open_address_needs_a_key_or_consent(host: str) -> None:
    with pytest.raises(ConfigError, match=r"--api-key KEY .* or --insecure"):
        bind(ServerOptions(host=host, port=0))
    for options in (
        ServerOptions(host=host, port=0, api_key="k"),
        ServerOptions(host=host, port=0, insecure=True),
    ):
        with bind(options) as bound:
            assert url_of(bound) == f"http://localhost:{bound.getsockname()[1]}"


def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port {port} on 127.0.0.1 is in use .* --port {port + 1}"):
            bind(ServerOptions(port=port))


def test_a_port_that_was_just_closed_is_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, _ = other.accept()
            accepted.close()  # the server closes first, so its side lingers in TIME_WAIT
            assert client.recv(1) == b""
    with bind(ServerOptions(port=port)):
        pass


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.7"])
def test_an_address_of_another_machine(host: str) -> None:
    with pytest.raises(ConfigError, match=f"{host}.*127.0.0.1"):
        bind(ServerOptions(host=host, port=0, insecure=True))


def test_answers_do_not_wait_for_acknowledgements() -> None:
    # asyncio sets TCP_NODELAY on the connections of sockets that name their protocol, and on no others.
    with bind(ServerOptions(port=0)) as bound:
        assert bound.proto == socket.IPPROTO_TCP
