"""Live and ready are two questions: asked while the server starts, serves, leaves, and is dead."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from running_server import RunningServer, wait_until
from server_process import Run, ServerProcess

import strata


def address(program: ServerProcess) -> str:
    """The URL that a server has taken, ready or not."""
    wait_until(lambda: "is free" in program.output, 30)
    return program.output.split("Address ")[1].split(" is free")[0]


def statuses(url: str) -> dict[str, int]:
    return {path: httpx.get(url + path).status_code for path in ("/livez", "/health", "/ready", "/readyz")}


def test_a_server_that_serves(served: RunningServer) -> None:
    assert statuses(served.url) == {"/livez": 200, "/health": 200, "/ready": 200, "/readyz": 200}
    assert served.http.get("/livez").json() == {"live": True, "problems": []}
    assert served.http.get("/ready").json() == {"ready": True, "reason": None}
    assert [served.http.request(method, "/ping").status_code for method in ("GET", "POST")] == [200, 200]
    assert served.http.get("/version").json() == {"version": strata.__version__}


def test_probes_may_ask_for_the_head_alone(served: RunningServer) -> None:
    for path in ("/livez", "/health", "/ready", "/readyz"):
        answer = served.http.head(path)
        assert (answer.status_code, answer.content) == (200, b"")


def test_the_load_is_the_answers_under_way(served: RunningServer) -> None:
    assert served.http.get("/load").json() == {"server_load": 0}
    served.engine.control.hold = True
    body = {"prompt": "x", "n": 2, "stream": True}
    with served.http.stream("POST", "/v1/completions", json=body) as answer:
        # An iterator that nobody holds closes the connection.
        lines = answer.iter_lines()
        next(lines)
        assert served.http.get("/load").json() == {"server_load": 2}


def test_probes_do_not_wait_behind_clients(served: RunningServer) -> None:
    started, goes_on = threading.Semaphore(0), threading.Event()

    def busy(*_: object, **__: object) -> list[int]:
        started.release()
        goes_on.wait(20)
        return [1]

    served.engine.tokenizer.encode = busy  # type: ignore[method-assign]
    with ThreadPoolExecutor(8) as clients:
        try:
            for _ in range(8):
                clients.submit(httpx.post, served.url + "/tokenize", json={"prompt": "x"}, timeout=20)
            for _ in range(8):
                assert started.acquire(timeout=10)
            assert statuses(served.url) == {"/livez": 200, "/health": 200, "/ready": 200, "/readyz": 200}
        finally:
            goes_on.set()


def test_a_dead_engine_is_neither(served: RunningServer) -> None:
    served.engine.control.dead = True
    assert statuses(served.url) == {"/livez": 503, "/health": 503, "/ready": 503, "/readyz": 503}
    assert served.http.get("/ping").status_code == 503
    assert served.http.get("/ready").json() == {"ready": False, "reason": "the engine thread ended"}
    metrics = served.http.get("/metrics").text
    assert "strata_engine_alive 0.0" in metrics and "strata_ready 0.0" in metrics


def test_probes_need_no_key(serve: Callable[..., RunningServer]) -> None:
    served = serve(api_key="key")
    assert set(statuses(served.url).values()) == {200}
    assert served.http.get("/metrics").status_code == 401


def test_a_server_that_starts_is_live_and_takes_no_requests(run: Run, tmp_path: Path) -> None:
    program = run(FAKE_LOAD_UNTIL=str(tmp_path / "loaded"))
    url = address(program)
    wait_until(lambda: "Loading" in program.output, 30)
    assert statuses(url) == {"/livez": 200, "/health": 503, "/ready": 503, "/readyz": 503}
    assert "loads the model" in httpx.get(url + "/ready").json()["reason"]
    refused = httpx.post(url + "/v1/completions", json={"prompt": "x"})
    assert refused.status_code == 503 and refused.headers["retry-after"]
    assert refused.json()["error"]["code"] == "starting"
    (tmp_path / "loaded").touch()
    wait_until(lambda: httpx.get(url + "/ready").status_code == 200)
    assert httpx.post(url + "/v1/completions", json={"prompt": "x"}).status_code == 200


@pytest.mark.parametrize("notice_s", ["0", "3"])
def test_ready_says_no_before_the_address_is_gone(run: Run, notice_s: str) -> None:
    program = run("--leave-notice-s", notice_s, FAKE_PIECES="200", FAKE_DELAY_S="0.01")
    url = program.url
    body = {"prompt": "x", "stream": True}
    with (
        httpx.Client(base_url=url) as kept,
        httpx.stream("POST", url + "/v1/completions", json=body) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        assert "connection" not in kept.get("/ready").headers
        program.process.send_signal(signal.SIGTERM)
        if notice_s != "0":
            wait_until(lambda: httpx.get(url + "/ready").status_code == 503)
            assert "asked to stop" in httpx.get(url + "/ready").json()["reason"]
            last = kept.get("/livez")
            assert last.status_code == 200 and last.headers["connection"] == "close"
            assert httpx.get(url + "/health").json()["ready"] is False
            assert httpx.post(url + "/v1/completions", json={"prompt": "late"}, timeout=60).status_code == 200
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert program.exit_code() == 0
    assert ("requests are taken for 3 s more" in program.output) == (notice_s != "0")
    assert "shutdown called, 0 unfinished" in program.output
