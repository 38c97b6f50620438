"""`GET /status`: what runs, waits and came before, in numbers that agree with the engine's and `/metrics`."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
from fake_engine import FakeEngine
from running_server import RunningServer, wait_until

from strata.config import StrataConfig
from strata.engine.api import Progress, TokenSources
from strata.engine.context import ContextBounds
from strata.errors import StrataError
from strata.serve.app import create_app
from strata.serve.status import status_of


def status(served: RunningServer) -> dict[str, Any]:
    answer = served.http.get("/status")
    answer.raise_for_status()
    body: dict[str, Any] = answer.json()
    return body


def ask(served: RunningServer, prompt: str, **fields: Any) -> None:
    served.http.post("/v1/completions", json={"prompt": prompt, **fields}).raise_for_status()


def test_an_idle_server(serve: Callable[..., RunningServer]) -> None:
    body = status(serve())
    assert body["model"] == "fake-model" and body["ok"] and body["problems"] == [] and body["notes"] == []
    assert body["running"] == [] and body["requests"] == [] and body["faults"] == []
    assert body["prompt_tokens"] == {"device": 100, "host": 0, "disk": 3984, "computed": 28}
    assert body["waiting"][0]["why"].startswith("deferred: request 6")
    assert [tier["up"] for tier in body["tiers"]] == [True, False, True]
    assert body["tiers"][1]["off_reason"] == "--host-memory is 0"
    assert body["links"][0]["limit_bytes_per_s"] == 2.5e9 and body["links"][1]["limit_bytes_per_s"] is None
    assert body["ttft"]["host"] == {"count": 0, "p50_s": None, "p99_s": None}


def test_a_finished_request_and_why_the_next_one_missed(serve: Callable[..., RunningServer]) -> None:
    served = serve()
    ask(served, "The same beginning of both, then <b>one</b> end.")
    served.engine.control.sources = TokenSources(host=32, computed=19)
    ask(served, "The same beginning of both, then <i>another</i> end.", max_tokens=3)
    later, first = status(served)["requests"]
    assert first["why"] == "the first request of its salt" and first["finish_reason"] == "stop"
    assert first["ttft_s"] == 0.25 and first["saved_s"] == 1.5 and first["divergence"] is None
    assert later["why"] == "diverged at token 34 from request 0"
    assert later["divergence"] == {
        "token": 34,
        "request_id": 0,
        "before": "both, then <",
        "here": "i>anothe",
        "there": "b>one</b",
    }
    assert later["sources"] == {"device": 0, "host": 32, "disk": 0, "computed": 19}
    body = status(served)
    assert body["ttft"]["computed"]["count"] == 1 and body["ttft"]["host"]["p99_s"] == 0.25
    assert body["token_gaps"]["count"] == 4, "three pieces each"
    assert body["saved_s"] == 3.0
    assert "strata_prefill_saved_seconds_total 3.0" in served.http.get("/metrics").text


def test_a_miss_after_a_flush_says_so(serve: Callable[..., RunningServer]) -> None:
    served = serve()
    for _ in range(2):
        ask(served, "The same beginning of both, and the same end of both.")
    served.http.post("/cache/flush").raise_for_status()
    ask(served, "The same beginning of both, and the same end of both.")
    flushed, evicted = (each["why"] for each in status(served)["requests"][:2])
    assert "48 of these were flushed, evicted, " in flushed and "48 of these were evicted, " in evicted


def test_a_request_keeps_the_clients_name_for_it_or_gets_one(serve: Callable[..., RunningServer]) -> None:
    served = serve()
    served.http.post("/v1/completions", json={"prompt": "x"}, headers={"x-request-id": "mine-1"})
    given = served.http.post("/v1/completions", json={"prompt": "x"}).headers["x-request-id"]
    assert [each["client_id"] for each in status(served)["requests"]] == [given, "mine-1"]


def test_a_prompt_that_is_scored_is_said_to_be_computed_for_that(serve: Callable[..., RunningServer]) -> None:
    served = serve()
    for _ in range(2):
        ask(served, "the same prompt, longer than a page", echo=True, logprobs=1, max_tokens=1)
    later = status(served)["requests"][0]
    assert "log probabilities" in later["why"] and later["divergence"] is None


def test_prompt_excerpts_can_be_turned_off(serve: Callable[..., RunningServer]) -> None:
    served = serve(prompt_excerpts=False)
    ask(served, "a secret of mine: one")
    ask(served, "a secret of mine: two")
    text = served.http.get("/status").text
    assert "secret" not in text and "mine" not in text
    assert json.loads(text)["requests"][0]["divergence"]["token"] == 18


def test_so_can_the_sentences_of_errors(serve: Callable[..., RunningServer]) -> None:
    for excerpts, shown in ((True, "the fake disk is gone"), (False, "error")):
        served = serve(prompt_excerpts=excerpts)
        served.engine.control.fail_after = 1
        assert served.http.post("/v1/completions", json={"prompt": "x"}).status_code == 503
        assert status(served)["requests"][0]["finish_reason"].startswith(shown)


def test_a_server_that_is_asked_to_stop_is_not_ready() -> None:
    config = StrataConfig.of(disk_capacity=0)
    service = create_app(FakeEngine(config), config).state.service
    assert status_of(service).ready
    service.leaving.set()
    assert not status_of(service).ready
    service.close()
    with pytest.raises(StrataError, match="the server has stopped"):
        asyncio.run(service.call(status_of, service))


def test_two_salts_are_never_compared(serve: Callable[..., RunningServer]) -> None:
    served = serve()
    ask(served, "the secret of one tenant, and more", cache_salt="one")
    ask(served, "the secret of one tenant, or less", cache_salt="other")
    text = served.http.get("/status").text
    assert json.loads(text)["requests"][0]["divergence"] is None and "secret" not in text


def test_a_running_request_shows_its_progress_and_an_aborted_one_ends(
    serve: Callable[..., RunningServer],
) -> None:
    served = serve()
    served.engine.control.pieces = ()
    served.engine.control.hold = True
    asking = threading.Thread(target=lambda: served.http.post("/v1/completions", json={"prompt": "x" * 50}))
    asking.start()
    wait_until(lambda: served.engine.streams)
    (running,) = status(served)["running"]
    assert running["phase"] == "waiting" and running["prompt_tokens"] == 50 and running["done_tokens"] == 0
    served.engine.control.progress = Progress(50, 40, 1.25, TokenSources(disk=32, computed=18))
    (running,) = status(served)["running"]
    assert running["phase"] == "prefill" and running["done_tokens"] == 40 and running["remaining_s"] == 1.25
    assert status(served)["requests"][0]["finish_reason"] is None
    served.engine.streams[0].abort()
    asking.join(10)
    body = status(served)
    assert body["running"] == [] and body["requests"][0]["finish_reason"] == "abort"
    assert body["requests"][0]["sources"]["disk"] == 0, "what the engine says at the end counts"


def test_an_error_of_the_engine_is_the_end_of_its_request(serve: Callable[..., RunningServer]) -> None:
    served = serve()
    served.engine.control.fail_after = 1
    assert served.http.post("/v1/completions", json={"prompt": "x"}).status_code == 503
    body = status(served)
    assert body["running"] == [] and "disk is gone" in body["requests"][0]["finish_reason"]


def test_faults_and_problems_show_once_there_are_any(serve: Callable[..., RunningServer]) -> None:
    served = serve()
    stats = served.engine.stats()
    served.engine.stats = lambda: {**stats, "corrupt_records": 3, "load_failed": 0}  # type: ignore[method-assign]
    served.engine.control.dead = True
    body = status(served)
    assert [fault["count"] for fault in body["faults"]] == [3] and "damaged records" in body["faults"][0][
        "what"
    ]
    assert not body["ok"] and body["problems"] == ["the engine thread ended"] and body["waiting"] == []


def test_an_address_that_anybody_can_reach_is_pointed_out(serve: Callable[..., RunningServer]) -> None:
    (note,) = status(serve(host="0.0.0.0", insecure=True))["notes"]
    assert (
        "everybody who reaches --host 0.0.0.0 can ask and flush the cache" in note and "--api-key KEY" in note
    )
    guarded = serve(host="0.0.0.0", insecure=True, admin_api_key="boss")
    answer = guarded.http.get("/status", headers={"Authorization": "Bearer boss"})
    (note,) = answer.json()["notes"]
    assert "can ask;" in note, "to flush takes the operators' key"
    assert status(serve(insecure=True))["notes"] == [], "only this machine reaches it"


def test_a_context_that_memory_bounds_is_pointed_out(serve: Callable[..., RunningServer]) -> None:
    served = serve()
    served.engine.context = ContextBounds(model=8192, device=2272, whole_bytes=377 << 20)
    (note,) = status(served)["notes"]
    assert note.startswith("the context is 2,272 tokens and not the model's 8192")
    assert note.endswith("--device-memory 377MiB holds all")


def test_a_template_that_writes_the_date_is_pointed_out(serve: Callable[..., RunningServer]) -> None:
    served = serve()
    served.engine.tokenizer.template_writes_date = True
    (note,) = status(served)["notes"]
    assert "--chat-template-date 20" in note
    fixed = serve(chat_template_date="2024-07-26")
    fixed.engine.tokenizer.template_writes_date = True
    assert status(fixed)["notes"] == []
