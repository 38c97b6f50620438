"""What one client can take: bytes, requests, connections, time."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from urllib.parse import urlsplit

import httpx
import pytest
from fake_engine import Control
from running_server import RunningServer, wait_until

POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
SMALL = 4096


def connect(served: RunningServer) -> socket.socket:
    parts = urlsplit(served.url)
    connection = socket.create_connection((parts.hostname, parts.port))
    connection.settimeout(20)
    return connection


def all_of(connection: socket.socket) -> bytes:
    """What the server sends until it closes; what came before a reset counts."""
    received = b""
    try:
        while piece := connection.recv(1 << 16):
            received += piece
    except ConnectionResetError:
        pass
    return received


def in_pieces(size: int) -> Iterator[bytes]:
    """A JSON body without a length, in pieces."""
    yield b'{"prompt": "'
    for _ in range(size // 1000):
        yield b"x" * 1000
    yield b'"}'


class TestBody:
    """`--max-body-bytes`, with a length and without."""

    @pytest.fixture
    def small(self, serve: Callable[..., RunningServer]) -> RunningServer:
        return serve(max_body_bytes=SMALL)

    @pytest.mark.parametrize("size", [SMALL + 1, 10 * SMALL])
    def test_too_large_is_413(self, small: RunningServer, size: int) -> None:
        answer = small.http.post("/v1/completions", json={"prompt": "x" * size})
        assert answer.status_code == 413
        error = answer.json()["error"]
        assert error["code"] == "body_too_large" and "--max-body-bytes" in error["message"]
        assert answer.headers["connection"] == "close"

    def test_a_body_without_a_length_is_counted_while_it_is_read(self, small: RunningServer) -> None:
        headers = {"Content-Type": "application/json"}
        for size, wanted in ((2000, 200), (5000, 413)):
            answer = small.http.post("/v1/completions", content=in_pieces(size), headers=headers)
            assert answer.status_code == wanted
        assert len(small.engine.streams) == 1

    def test_a_body_that_never_ends_is_cut(self, small: RunningServer) -> None:
        with closing(connect(small)) as client:
            client.sendall(POST + b"Transfer-Encoding: chunked\r\n\r\n")
            sent = 0
            try:
                while sent < 1000 * SMALL:
                    client.sendall(b"400\r\n" + b"x" * 1024 + b"\r\n")
                    sent += 1024
            except OSError:
                pass  # cut, as it should be
            assert sent < 1000 * SMALL
        assert small.http.post("/v1/completions", json={"prompt": "x"}).status_code == 200

    def test_whoever_waits_to_be_let_in_is_told_before_sending(self, small: RunningServer) -> None:
        with closing(connect(small)) as client:
            client.sendall(POST + b"Expect: 100-continue\r\nContent-Length: 1000000\r\n\r\n")
            assert client.recv(1000).startswith(b"HTTP/1.1 413")

    def test_what_all_bodies_hold_is_bounded(
        self, serve: Callable[..., RunningServer], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("strata.serve.limits._BODIES_HELD", 2)
        served = serve(max_body_bytes=SMALL)
        body = {"prompt": "x" * (SMALL - 500), "stream": True}
        with ExitStack() as stack:
            for _ in range(2):
                client = stack.enter_context(closing(connect(served)))
                client.sendall(POST + b"Content-Length: %d\r\n\r\n" % SMALL + b" " * (SMALL - 1))
            wait_until(lambda: served.http.post("/v1/completions", json=body).status_code == 503)
            answer = served.http.post("/v1/completions", json=body)
            assert answer.status_code == 503 and answer.json()["error"]["code"] == "bodies_full"
            assert int(answer.headers["retry-after"]) >= 1
        wait_until(lambda: served.http.post("/v1/completions", json=body).status_code == 200)

    def test_a_body_counts_only_while_it_is_read(
        self, serve: Callable[..., RunningServer], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("strata.serve.limits._BODIES_HELD", 1)
        served = serve(max_body_bytes=SMALL)
        served.engine.control = Control(hold=True)
        body = {"prompt": "x" * (SMALL - 500), "stream": True}
        with ExitStack() as stack:
            for _ in range(3):
                answer = stack.enter_context(served.http.stream("POST", "/v1/completions", json=body))
                assert answer.status_code == 200


@pytest.mark.parametrize(
    "begun",
    [
        b"GET /" + b"x" * 100_000,
        POST + b"X-Big: " + b"x" * 100_000,
        POST + b"X-Many: x\r\n" * 10_000,
    ],
)
def test_a_head_is_bounded(served: RunningServer, begun: bytes) -> None:
    with closing(connect(served)) as client:
        with suppress(OSError):  # it is cut while it sends
            client.sendall(begun)
        received = all_of(client)
    assert received.startswith(b"HTTP/1.1 431 Request Header Fields Too Large")


def test_so_is_one_behind_another_request(served: RunningServer) -> None:
    with closing(connect(served)) as client, pytest.raises(OSError):
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /")
        for _ in range(10_000):
            client.sendall(b"x" * 1000)


def test_whoever_asks_for_another_protocol_does_not_fill_the_log(
    served: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    headers = {"Connection": "Upgrade", "Upgrade": "websocket"}
    assert served.http.get("/livez", headers=headers).status_code == 200
    assert "upgrade" not in caplog.text.lower()


def test_trailers_are_bounded(served: RunningServer) -> None:
    with closing(connect(served)) as client:
        client.sendall(POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n")
        with pytest.raises(OSError):
            for _ in range(10_000):
                client.sendall(b"X-Trailer: " + b"x" * 1000 + b"\r\n")


def test_a_body_that_nobody_reads_is_no_head(served: RunningServer) -> None:
    for _ in range(2):
        answer = served.http.post(
            "/no", content=b"x" * 1_000_000, headers={"Content-Type": "application/json"}
        )
        assert answer.status_code == 404


def test_more_prompts_than_can_ever_wait_are_refused_for_good(serve: Callable[..., RunningServer]) -> None:
    served = serve(max_running=2, max_waiting=3)
    for body, wanted in (
        ({"prompt": ["x"] * 5}, 200),
        ({"prompt": ["x"] * 6}, 400),
        ({"prompt": "x", "n": 6}, 400),
    ):
        answer = served.http.post("/v1/completions", json=body)
        assert answer.status_code == wanted
    assert answer.json()["error"]["code"] == "too_many_choices"
    assert "--max-waiting" in answer.json()["error"]["message"]
    assert len(served.engine.streams) == 5
    assert served.engine.tokenizer.encoded == 5, "prompts were tokenised before they were counted"


class TestConcurrency:
    """`--max-concurrency-per-key`."""

    def test_each_key_has_its_own(self, serve: Callable[..., RunningServer]) -> None:
        served = serve(api_key="one,two", max_concurrency_per_key=2)
        one, two = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
        served.engine.control = Control(hold=True)
        body = {"prompt": "x", "stream": True}
        with ExitStack() as stack:
            for _ in range(2):
                stack.enter_context(served.http.stream("POST", "/v1/completions", json=body, headers=one))
            served.engine.control = Control()
            answer = served.http.post("/v1/completions", json=body, headers=one)
            assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["type"] == "rate_limit_error"
            assert "--max-concurrency-per-key" in answer.json()["error"]["message"]
            assert served.http.post("/v1/completions", json=body, headers=two).status_code == 200
            assert served.http.get("/v1/models", headers=one).status_code == 200
            assert served.http.post("/cache/flush", headers=one).status_code == 200
        wait_until(lambda: served.http.post("/v1/completions", json=body, headers=one).status_code == 200)

    def test_without_keys_all_count_together(self, serve: Callable[..., RunningServer]) -> None:
        served = serve(max_concurrency_per_key=1)
        served.engine.control = Control(hold=True)
        body = {"prompt": "x", "stream": True}
        with served.http.stream("POST", "/v1/completions", json=body):
            assert served.http.post("/v1/completions", json=body).status_code == 429


class TestSlowClients:
    """`--client-timeout-s`, and `--max-connections`."""

    @pytest.fixture
    def hasty(self, serve: Callable[..., RunningServer]) -> RunningServer:
        return serve(client_timeout_s=0.4, max_connections=3)

    @pytest.mark.parametrize(
        "begun",
        [
            b"",
            b"POST /v1/comp",
            POST + b"X-Slow: ",
            POST + b"Content-Length: 100\r\n\r\n{",
            POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{",
        ],
    )
    def test_a_request_that_is_never_sent_is_cut(self, hasty: RunningServer, begun: bytes) -> None:
        with closing(connect(hasty)) as client:
            client.sendall(begun)
            received = all_of(client)
        assert received.startswith(b"HTTP/1.1 408") and b"--client-timeout-s" in received
        assert json.loads(received.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_timeout"

    @pytest.mark.parametrize(
        "begun",
        [
            b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET ",
            b"POST /no HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999\r\n\r\n",
        ],
    )
    def test_bytes_that_come_one_by_one_do_not_help(self, hasty: RunningServer, begun: bytes) -> None:
        with closing(connect(hasty)) as client:
            client.sendall(begun)
            assert client.recv(4096).startswith(b"HTTP/1.1 ")

            def cut() -> bool:
                try:
                    client.sendall(b"x")
                except OSError:
                    return True
                return False

            wait_until(cut)

    def test_headers_earn_no_time(
        self, serve: Callable[..., RunningServer], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("strata.serve.connections._LEAST_BYTES_PER_S", 1)
        served = serve(client_timeout_s=0.3)
        with closing(connect(served)) as client:
            client.sendall(POST + b"X-Slow: " + b"x" * 1000)
            assert all_of(client).startswith(b"HTTP/1.1 408")

    def test_a_body_earns_no_more_than_so_much_time(
        self, serve: Callable[..., RunningServer], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("strata.serve.connections._LEAST_BYTES_PER_S", 1)
        served = serve(client_timeout_s=0.2)
        with closing(connect(served)) as client:
            client.sendall(POST + b"Content-Length: 5000\r\n\r\n" + b"x" * 1000)
            assert all_of(client).startswith(b"HTTP/1.1 408")

    def test_no_answer_is_written_into_another(self, hasty: RunningServer) -> None:
        hasty.engine.control = Control(pieces=("a",) * 4, delay_s=0.25)
        body = b'{"prompt": "x", "stream": true}'
        first = POST + b"Content-Length: %d\r\n\r\n" % len(body) + body
        with closing(connect(hasty)) as client:
            client.sendall(first + POST + b"Content-Length: 100\r\n\r\n{")
            assert b"408 Request" not in all_of(client)

    def test_an_idle_connection_is_kept(self, hasty: RunningServer) -> None:
        with closing(connect(hasty)) as client:
            for _ in range(2):
                client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                received = b""
                while not received.endswith(b"}"):
                    received += client.recv(4096)
                assert received.startswith(b"HTTP/1.1 200")
                time.sleep(0.6)  # longer than a request may take to be sent

    def test_a_long_answer_is_no_slow_client(self, hasty: RunningServer) -> None:
        hasty.engine.control = Control(pieces=("a",) * 4, delay_s=0.25)
        answer = hasty.http.post("/v1/completions", json={"prompt": "x", "stream": True})
        assert answer.text.endswith("data: [DONE]\n\n")

    def test_a_body_that_is_large_and_comes_steadily_has_more_time(
        self, serve: Callable[..., RunningServer], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("strata.serve.connections._LEAST_BYTES_PER_S", 1000)
        served = serve(client_timeout_s=0.3)

        def slowly() -> Iterator[bytes]:
            for piece in in_pieces(5000):
                time.sleep(0.05)
                yield piece

        headers = {"Content-Type": "application/json"}
        answer = served.http.post("/v1/completions", content=slowly(), headers=headers)
        assert answer.status_code == 400 and "5000 tokens" in answer.text

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_reader_that_does_not_read_is_cut_and_its_request_aborted(
        self, hasty: RunningServer, stream: bool
    ) -> None:
        hasty.engine.control = Control(pieces=("x" * 100_000,) * 200)
        body = json.dumps({"prompt": "x", "stream": stream}).encode()
        with closing(connect(hasty)) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            wait_until(lambda: len(hasty.engine.streams) == 1)
            answered = hasty.engine.streams[0]
            wait_until(lambda: answered.aborted.is_set() if stream else answered.ended)
            hasty.engine.control = Control()
            assert hasty.http.post("/v1/completions", json={"prompt": "y"}).status_code == 200
            wait_until(lambda: open_connections(hasty) == 1)
            assert len(all_of(client)) < 20_000_000

    def test_connections_beyond_the_limit_are_told_so(self, hasty: RunningServer) -> None:
        hasty.engine.control = Control(hold=True)
        with ExitStack() as stack:
            for number in range(3):
                client = stack.enter_context(httpx.Client(base_url=hasty.url))
                stack.enter_context(
                    client.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True})
                )
                wait_until(lambda number=number: len(hasty.engine.streams) == number + 1)
            answer = hasty.http.post("/v1/completions", json={"prompt": "x"})
            assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["code"] == "too_many_connections"
            assert answer.headers["connection"] == "close"
        hasty.engine.control = Control()
        wait_until(lambda: hasty.http.post("/v1/completions", json={"prompt": "x"}).status_code == 200)

    def test_far_beyond_it_they_are_cut(self, hasty: RunningServer) -> None:
        with ExitStack() as stack:
            clients = [stack.enter_context(closing(connect(hasty))) for _ in range(7)]
            assert all_of(clients[-1]) == b""


def open_connections(served: RunningServer) -> int:
    return len(served.connections)
