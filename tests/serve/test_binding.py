"""Which addresses may be served, and what is said of those that may not."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys

import pytest
from running_server import wait_until

from strata.config import ServerOptions
from strata.errors import ConfigError
from strata.serve.binding import bind, is_loopback, place_of, url_of
from strata.serve.port_owner import command_of, owner_of


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.0.2"])
def test_loopback_needs_no_key(host: str) -> None:
    with bind(ServerOptions(host=host, port=0)) as bound:
        assert url_of(bound).startswith("http://127.0.0.") and place_of(bound) == url_of(bound)


@pytest.mark.parametrize("host", ["0.0.0.0", ""])
def test_an_open_address_needs_a_key_or_consent(host: str) -> None:
    with pytest.raises(ConfigError, match=r"--api-key KEY .* or --insecure"):
        bind(ServerOptions(host=host, port=0))
    for options in (
        ServerOptions(host=host, port=0, api_key=("k",)),
        ServerOptions(host=host, port=0, insecure=True),
    ):
        with bind(options) as bound:
            assert url_of(bound) == f"http://localhost:{bound.getsockname()[1]}"
            assert place_of(bound) == url_of(bound) + " (and every other address of this machine)"


LISTEN = """
import socket, time
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
time.sleep(600)
"""


def test_a_port_in_use_names_who_uses_it_and_a_free_one() -> None:
    command = [sys.executable, "-c", LISTEN]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        port = int(other.stdout.readline())
        try:
            with pytest.raises(ConfigError) as caught:
                bind(ServerOptions(port=port))
            assert f"--port {port} on 127.0.0.1 is in use by process {other.pid} (" in str(caught.value)
            found = re.search(r"free now: --port (\d+)$", str(caught.value))
            assert found and int(found[1]) != port
            with bind(ServerOptions(port=int(found[1]))) as bound:
                bound.listen()
        finally:
            other.kill()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "::1"])
def test_who_listens_is_found_whichever_address_it_is(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as other:
        port = other.getsockname()[1]
        for address in {"127.0.0.1" if host != "::1" else host, host}:
            assert f"process {os.getpid()} (" in str(owner_of(address, port))
        assert owner_of("127.0.0.1", port) is None or host != "::1"
    assert owner_of(host, port) is None


def test_keys_in_a_command_line_are_not_repeated() -> None:
    command = [sys.executable, "-c", "import time; time.sleep(600)", "--api-key", "s3cret", "s3cret2"]
    with subprocess.Popen([*command, "--admin-api-key=s3cret3", "--last"]) as other:
        try:
            wait_until(lambda: "time.sleep" in command_of(other.pid))
            assert "s3cret" not in command_of(other.pid)
            assert command_of(other.pid).endswith("--api-key ... --admin-api-key=... --last")
        finally:
            other.kill()


def test_loopback_is_known_by_any_of_its_names() -> None:
    assert all(
        is_loopback(ServerOptions(host=host)) for host in ("127.0.0.1", "localhost", "::1", "127.3.2.1")
    )
    assert not any(is_loopback(ServerOptions(host=host)) for host in ("0.0.0.0", "", "::"))


def test_connections_inherit_their_bounds() -> None:
    with bind(ServerOptions(port=0, client_timeout_s=7.0)) as bound:
        bound.listen()
        with socket.create_connection(bound.getsockname()), bound.accept()[0] as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 7000
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) <= 1 << 20


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
