"""`/metrics` agrees with what clients saw: each prompt token is counted once, under where its KV came from.

A request counts whole when it is first given its pages: one that leaves before counts nothing, one that leaves after
stays counted.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tiny_folder import make_folder
from tiny_server import Samples, TinyServer, wait_for

DEPLOY = Path(__file__).parents[2] / "deploy"
METRIC = re.compile(r"(?<![/\w])(?:vllm:|strata_|process_)\w+")
SOURCES = ("device", "host", "disk", "computed")
PAGE_BYTES = 2 * 2 * 2 * 12 * 4 * 16
"""Of the tiny model: layers, parts, heads, head size, bytes of a number, tokens."""
HOST_PAGE_BYTES = 8192
"""The same in whole blocks of 4 KiB."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyServer]:
    """Two may run; the device holds fewer documents than are asked about, the host too."""
    root = tmp_path_factory.mktemp("metrics")
    server = TinyServer(
        make_folder(root / "model"),
        max_running=2,
        device_memory=110 * PAGE_BYTES,
        host_memory=170 * HOST_PAGE_BYTES,
        disk_path=root / "kv",
        disk_capacity="64MiB",
    )
    yield server
    server.stop()


def document(number: int, tokens: int) -> list[int]:
    """Token ids that no other document begins with."""
    generator = random.Random(number)
    return [number, *(generator.randrange(5, 300) for _ in range(tokens - 1))]


def ask(server: TinyServer, prompt: list[int], tokens: int = 4) -> dict[str, Any]:
    """The usage that a streamed answer ends with."""
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True}
    usage: dict[str, Any] = {}
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=60) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                usage = json.loads(line.removeprefix("data: ")).get("usage") or usage
    return usage


def started(server: TinyServer, stack: ExitStack, prompt: list[int]) -> Iterator[str]:
    """A long answer's lines; the client leaves when `stack` closes."""
    body = {"prompt": prompt, "max_tokens": 1000, "ignore_eos": True, "stream": True}
    answer = stack.enter_context(httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=60))
    return answer.iter_lines()


@contextmanager
def slow_steps(server: TinyServer) -> Iterator[None]:
    """Makes each step take long enough that a long answer outlasts the test."""
    model = server.engine._served.model
    forward = model.forward

    def slow_forward(*arguments: Any) -> Any:
        time.sleep(0.05)
        return forward(*arguments)

    model.forward = slow_forward  # type: ignore[method-assign]
    yield
    model.forward = forward  # type: ignore[method-assign]


def labelled(samples: Samples, name: str, label: str) -> dict[str, float]:
    """Values of a metric by one label."""
    return {dict(labels)[label]: value for (found, labels), value in samples.items() if found == name}


def vllm(samples: Samples, name: str) -> float:
    """The value of one of vLLM's metrics that has its two labels alone."""
    (value,) = [
        value for (found, labels), value in samples.items() if found == f"vllm:{name}" and len(labels) == 2
    ]
    return value


def counted(samples: Samples) -> float:
    """Prompt tokens so far; all ways of counting them must agree."""
    ours = labelled(samples, "strata_prompt_tokens_total", "source")
    theirs = labelled(samples, "vllm:prompt_tokens_by_source_total", "source")
    whole = vllm(samples, "prompt_tokens_total")
    assert set(ours) == set(SOURCES) and sum(ours.values()) == whole
    assert theirs == {
        "local_compute": ours["computed"],
        "local_cache_hit": ours["device"],
        "external_kv_transfer": ours["host"] + ours["disk"],
    }
    assert vllm(samples, "prefix_cache_queries_total") == whole
    assert vllm(samples, "prefix_cache_hits_total") == ours["device"]
    assert vllm(samples, "external_prefix_cache_hits_total") == ours["host"] + ours["disk"]
    assert vllm(samples, "prompt_tokens_cached_total") == whole - ours["computed"]
    return whole


def test_sources_sum_to_prompt_tokens(server: TinyServer) -> None:
    documents = random.Random(3).choices(range(8), k=40)
    prompts = [
        document(which, 400) + document(50 + number, number % 7 + 1) for number, which in enumerate(documents)
    ]
    with ThreadPoolExecutor(8) as clients:
        usages = list(clients.map(lambda prompt: ask(server, prompt), prompts))
    server.wait_idle()
    samples = server.metrics()
    assert [usage["prompt_tokens"] for usage in usages] == [len(prompt) for prompt in prompts]
    by_source = {source: sum(usage["strata"][source] for usage in usages) for source in SOURCES}
    assert labelled(samples, "strata_prompt_tokens_total", "source") == by_source
    assert all(by_source.values()), f"every tier should have been used: {by_source}"
    assert counted(samples) == sum(map(len, prompts))
    # What the HTTP side counted, request by request, is the same.
    assert vllm(samples, "request_prompt_tokens_sum") == sum(map(len, prompts))
    assert (
        vllm(samples, "request_generation_tokens_sum") == vllm(samples, "generation_tokens_total") == 4 * 40
    )
    # A step computes the prompts' tokens, or for each answer the one before the next.
    assert vllm(samples, "iteration_tokens_total_sum") == by_source["computed"] + 3 * 40
    assert vllm(samples, "request_params_max_tokens_sum") == 4 * 40
    assert vllm(samples, "request_max_num_generation_tokens_sum") == 4 * 40
    for histogram in (
        "time_to_first_token",
        "e2e_request_latency",
        "request_queue_time",
        "request_prefill_time",
    ):
        assert vllm(samples, f"{histogram}_seconds_count") == 40
    assert vllm(samples, "inter_token_latency_seconds_count") == 3 * 40
    ended = labelled(samples, "vllm:request_success_total", "finished_reason")
    assert ended == {"stop": 0, "length": 40, "abort": 0}


def test_times_of_a_request_add_up(server: TinyServer) -> None:
    before = server.metrics()
    usage = ask(server, document(90, 300), tokens=8)
    server.wait_idle()
    after = server.metrics()

    def grown(name: str) -> float:
        return vllm(after, f"{name}_seconds_sum") - vllm(before, f"{name}_seconds_sum")

    parts = [grown(f"request_{part}_time") for part in ("queue", "prefill", "decode")]
    assert all(part > 0 for part in parts)
    assert sum(parts) == pytest.approx(grown("e2e_request_latency"), abs=1e-6)
    assert parts[0] + parts[1] == pytest.approx(grown("time_to_first_token"), abs=1e-6)
    assert grown("time_to_first_token") == pytest.approx(usage["strata"]["ttft_s"], abs=1e-5)
    told = [usage["strata"][f"{part}_s"] for part in ("queue", "prefill", "decode")]
    assert told == pytest.approx(parts, abs=1e-5)
    # The engine counts the same gaps as they come out.
    assert grown("inter_token_latency") == pytest.approx(parts[2], abs=1e-6)


def test_those_who_leave_count_if_they_were_admitted(server: TinyServer) -> None:
    server.wait_idle()
    before = server.metrics()
    running = [document(100 + number, 200) for number in range(2)]
    waiting = [document(110 + number, 150) for number in range(3)]
    with slow_steps(server), ExitStack() as runners:
        # Kept: a generator of lines that nobody holds closes its connection.
        answers = [started(server, runners, prompt) for prompt in running]
        assert all(next(lines) for lines in answers)
        with ExitStack() as waiters:
            queued = [started(server, waiters, prompt) for prompt in waiting]
            wait_for(lambda: len(server.engine.waiting()) == len(queued))
            samples = server.metrics()
            assert vllm(samples, "num_requests_running") == 2
            assert vllm(samples, "num_requests_waiting") == 3
            assert labelled(samples, "vllm:num_requests_waiting_by_reason", "reason") == {
                "capacity": 3,
                "deferred": 0,
            }
            assert labelled(samples, "strata_waiting_by_reason", "reason")["running_full"] == 3
            assert 0 < vllm(samples, "kv_cache_usage_perc") < 1
            assert [report.kind for report in server.engine.waiting()] == ["running_full"] * 3
            assert counted(samples) == counted(before) + sum(map(len, running))
        wait_for(lambda: not server.engine.waiting())
    server.wait_idle()
    after = server.metrics()
    assert counted(after) == counted(before) + sum(map(len, running))
    reasons = labelled(after, "vllm:request_success_total", "finished_reason")
    assert reasons["abort"] - labelled(before, "vllm:request_success_total", "finished_reason")["abort"] == 5
    assert vllm(after, "kv_cache_usage_perc") == 0


def test_dashboard_alerts_and_guide_name_metrics_that_exist(server: TinyServer) -> None:
    ask(server, document(120, 50))
    server.wait_idle()
    exported = {name for name, _ in server.metrics()}
    # A guide may say a histogram's name; what is asked of Prometheus must be one of its samples.
    histograms = {name.removesuffix("_bucket") for name in exported if name.endswith("_bucket")}
    guide = DEPLOY.parent / "docs" / "OPERATIONS.md"
    files = (DEPLOY / "grafana.json", set(), 30), (DEPLOY / "alerts.yml", set(), 5), (guide, histograms, 30)
    for file, families, least in files:
        used = {name for name in METRIC.findall(file.read_text(encoding="utf-8")) if not name.endswith("_")}
        assert len(used) >= least and used <= exported | families, (file, used - exported - families)
