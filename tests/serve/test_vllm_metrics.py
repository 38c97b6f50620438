"""What dashboards and routers made for vLLM find under its names; the numbers are a fake engine's."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from running_server import RunningServer

from strata.engine.api import WAITING_KINDS

RUST = Path(__file__).parents[2] / "rust"


def samples_of(served: RunningServer) -> dict[str, float]:
    """Every sample of vLLM's by name and the labels beside the model's and the engine's."""
    found = {}
    for family in text_string_to_metric_families(served.http.get("/metrics").raise_for_status().text):
        for sample in family.samples:
            if sample.name.startswith("vllm:"):
                labels = dict(sample.labels)
                assert (labels.pop("model_name"), labels.pop("engine")) == ("org/tiny", "0"), sample
                rest = ",".join(f"{name}={value}" for name, value in sorted(labels.items()))
                found[sample.name.removeprefix("vllm:") + (f"{{{rest}}}" if rest else "")] = sample.value
    return found


def test_the_engines_numbers(serve: Callable[..., RunningServer]) -> None:
    samples = samples_of(serve(served_model_name="org/tiny", page_size=32))
    expected = {
        "num_requests_running": 2,
        "num_requests_waiting": 1,
        "num_requests_waiting_by_reason{reason=capacity}": 0,
        "num_requests_waiting_by_reason{reason=deferred}": 1,
        # 40 used, of which 30 are cached and 3 of those pinned.
        "kv_cache_usage_perc": 0.13,
        "prompt_tokens_total": 4112,
        "prompt_tokens_by_source_total{source=local_compute}": 28,
        "prompt_tokens_by_source_total{source=local_cache_hit}": 100,
        "prompt_tokens_by_source_total{source=external_kv_transfer}": 3984,
        "prompt_tokens_cached_total": 4084,
        "prefix_cache_queries_total": 4112,
        "prefix_cache_hits_total": 100,
        "external_prefix_cache_queries_total": 4012,
        "external_prefix_cache_hits_total": 3984,
        "generation_tokens_total": 11,
        "num_preemptions_total": 7,
        "cache_config_info{block_size=32,num_gpu_blocks=100}": 1,
        "inter_token_latency_seconds_bucket{le=0.01}": 4,
        "inter_token_latency_seconds_bucket{le=2.5}": 9,
        "inter_token_latency_seconds_bucket{le=+Inf}": 10,
        "inter_token_latency_seconds_sum": 12.5,
        "iteration_tokens_total_bucket{le=1.0}": 7,
        "iteration_tokens_total_bucket{le=+Inf}": 8,
        "iteration_tokens_total_sum": 520,
        "request_success_total{finished_reason=abort}": 6,
    }
    assert {name: samples.get(name) for name in expected} == expected


def test_what_was_cut_short_is_in_no_histogram(serve: Callable[..., RunningServer]) -> None:
    served = serve(served_model_name="org/tiny")
    served.engine.control.finish_reason = "abort"
    assert served.http.post("/v1/completions", json={"prompt": "x"}).status_code == 503
    assert samples_of(served)["time_to_first_token_seconds_count"] == 0
    text = served.http.get("/metrics").text
    assert "strata_time_to_first_token_seconds_count 0.0" in text
    assert 'strata_requests_finished_total{reason="abort"} 1.0' in text


def test_the_requests_numbers(serve: Callable[..., RunningServer]) -> None:
    served = serve(served_model_name="org/tiny")
    body = {"prompt": "12345678", "max_tokens": 20}
    served.http.post("/v1/completions", json=body).raise_for_status()
    samples = samples_of(served)
    expected = {
        "time_to_first_token_seconds_sum": 0.25,
        "time_to_first_token_seconds_bucket{le=0.25}": 1,
        "request_queue_time_seconds_sum": 0.05,
        "request_prefill_time_seconds_sum": 0.2,
        "request_decode_time_seconds_sum": 0.5,
        "request_inference_time_seconds_sum": 0.7,
        "e2e_request_latency_seconds_sum": 0.75,
        # "Hello, world" has 12 tokens of a character each.
        "request_time_per_output_token_seconds_sum": 0.5 / 11,
        "request_prompt_tokens_sum": 8,
        "request_generation_tokens_sum": 12,
        "request_prefill_kv_computed_tokens_sum": 8,
        "request_params_max_tokens_sum": 20,
        "request_params_n_sum": 1,
        "request_max_num_generation_tokens_sum": 12,
        "request_success_total{finished_reason=stop}": 1,
        "request_success_total{finished_reason=length}": 0,
    }
    assert {name: samples.get(name) for name in expected} == expected


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompts_answers_count_once_together(serve: Callable[..., RunningServer], stream: bool) -> None:
    served = serve(served_model_name="org/tiny")
    body = {"prompt": ["a", "bc"], "n": 3, "stream": stream}
    served.http.post("/v1/completions", json=body).raise_for_status()
    samples = samples_of(served)
    expected = {
        "request_params_n_count": 2,
        "request_params_n_sum": 6,
        "request_max_num_generation_tokens_sum": 24,
        "request_generation_tokens_sum": 72,
        "request_params_max_tokens_sum": 6 * 16,
    }
    assert {name: samples.get(name) for name in expected} == expected


def test_a_scrape_of_a_dead_engine_succeeds(serve: Callable[..., RunningServer]) -> None:
    served = serve(served_model_name="org/tiny")
    served.engine.control.dead = True
    samples = samples_of(served)
    assert "num_requests_running" not in samples
    assert samples["time_to_first_token_seconds_count"] == 0
    assert "strata_engine_alive 0.0" in served.http.get("/metrics").text


def test_every_reason_that_the_scheduler_gives_has_a_label() -> None:
    source = (RUST / "strata-sched/src/why.rs").read_text(encoding="utf-8")
    body = source.split("pub fn kind(&self)")[1].split("\n    }\n")[0]
    assert tuple(re.findall(r'=> "(\w+)"', body)) == WAITING_KINDS
