"""A client that leaves frees its request at once; a slow or blocked one holds up nobody."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing
from urllib.parse import urlsplit

import httpx
import pytest
from fake_engine import Control, FakeStream
from running_server import RunningServer, wait_until

from strata.engine.api import GenerationRequest


def send_request(url: str, body: dict[str, object]) -> socket.socket:
    """A connection with one request sent and nothing read."""
    parts = urlsplit(url)
    connection = socket.create_connection((parts.hostname, parts.port))
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n"
    connection.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + content)
    return connection


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("pieces", [(), ("a", "b")])
def test_leaving_aborts(served: RunningServer, stream: bool, pieces: tuple[str, ...]) -> None:
    served.engine.control = Control(pieces=pieces, hold=True)
    with closing(send_request(served.url, {"prompt": ["x", "y"], "stream": stream})):
        wait_until(lambda: len(served.engine.streams) == 2)
        time.sleep(0.1)  # the requests must be seen to go on while the client stays
        assert not any(item.aborted.is_set() for item in served.engine.streams)
    wait_until(lambda: all(item.aborted.is_set() for item in served.engine.streams))


def test_leaving_an_sdk_stream_aborts(serve: Callable[..., RunningServer]) -> None:
    served = serve()
    served.engine.control = Control(pieces=("a",) * 1000, delay_s=0.01)
    with served.openai.completions.create(model="default", prompt="x", stream=True) as stream:
        next(iter(stream))
    wait_until(lambda: served.engine.streams[0].aborted.is_set())
    wait_until(lambda: "strata_answers_cut_total 1.0" in served.http.get("/metrics").text)


def test_a_client_that_does_not_read_holds_up_nobody(served: RunningServer) -> None:
    served.engine.control = Control(pieces=("x" * 100_000,) * 200)
    with closing(send_request(served.url, {"prompt": "x", "stream": True})):
        wait_until(lambda: len(served.engine.streams) == 1)
        served.engine.control = Control()
        for _ in range(20):
            served.http.post("/v1/completions", json={"prompt": "y"}).raise_for_status()
        assert not served.engine.streams[0].aborted.is_set()
    wait_until(lambda: served.engine.streams[0].aborted.is_set())


def test_a_finished_answer_aborts_nothing(served: RunningServer) -> None:
    served.http.post("/v1/completions", json={"prompt": "x"}).raise_for_status()
    served.http.post("/v1/completions", json={"prompt": "x", "stream": True}).raise_for_status()
    assert [item.aborted.is_set() for item in served.engine.streams] == [False, False]


def test_a_blocking_flush_leaves_the_event_loop_free(served: RunningServer) -> None:
    served.engine.flush_may_end.clear()
    answers: list[httpx.Response] = []
    flush = threading.Thread(
        target=lambda: answers.append(httpx.post(served.url + "/cache/flush", timeout=20))
    )
    flush.start()
    assert served.engine.flush_started.wait(10)
    served.http.post("/v1/completions", json={"prompt": "x"}).raise_for_status()
    assert answers == []
    served.engine.flush_may_end.set()
    flush.join(10)
    assert [answer.status_code for answer in answers] == [200]


def test_a_defect_while_submitting_leaves_nothing_running(
    served: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = served.engine.submit

    def third_fails(request: GenerationRequest) -> FakeStream:
        if len(served.engine.streams) == 2:
            raise ZeroDivisionError
        stream: FakeStream = submit(request)
        return stream

    monkeypatch.setattr(served.engine, "submit", third_fails)
    served.engine.control = Control(hold=True)
    # On a connection of its own, which the server closes after a defect.
    answer = httpx.post(served.url + "/v1/completions", json={"prompt": "x", "n": 3}, timeout=20)
    assert answer.status_code == 500
    assert [each.aborted.is_set() for each in served.engine.streams] == [True, True]


def test_tokenising_and_submitting_happen_in_worker_threads(served: RunningServer) -> None:
    served.http.post("/v1/completions", json={"prompt": "x"}).raise_for_status()
    threads = served.engine.submit_threads | served.engine.tokenizer.threads
    assert threads and all(name.startswith("strata-http_") for name in threads)


def test_answers_are_interleaved(served: RunningServer) -> None:
    served.engine.control = Control(hold=True)
    with closing(send_request(served.url, {"prompt": "x"})):
        wait_until(lambda: len(served.engine.streams) == 1)
        served.engine.control = Control()
        assert served.http.post("/v1/completions", json={"prompt": "y"}).json()["usage"]["prompt_tokens"] == 1
        assert not served.engine.streams[0].aborted.is_set()
