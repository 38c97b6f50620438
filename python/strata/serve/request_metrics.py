"""What requests took, under vLLM's names: histograms of their times and lengths, and how they ended.

A request counts when its last chunk is taken, which those that the client left do not live to see: these are in
`vllm:request_success_total` as `abort`, by the engine's own count, and in no histogram.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from strata.engine.api import EngineProtocol, Usage
from strata.errors import StrataError
from strata.serve.engine_metrics import LABEL_NAMES, vllm_labels

_TTFT_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_GAP_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_S = (
    *(0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
"""vLLM's ends, and three below them: what comes out of the cache takes less than 0.3 s."""
_ANSWERS = (1.0, 2.0, 5.0, 10.0, 20.0)
_TOKENS = tuple(float(digit * 10**power) for power in range(7) for digit in (1, 2, 5))


class RequestMetrics:
    """One set of histograms in one registry."""

    def __init__(self, engine: EngineProtocol, model_name: str, registry: CollectorRegistry) -> None:
        labels = vllm_labels(model_name)

        def histogram(name: str, doc: str, ends: tuple[float, ...]) -> Histogram:
            return Histogram(f"vllm:{name}", doc, LABEL_NAMES, buckets=ends, registry=registry).labels(
                *labels
            )

        self._ttft = histogram(
            "time_to_first_token_seconds", "Seconds from submission to the first token", _TTFT_S
        )
        self._per_token = histogram(
            "request_time_per_output_token_seconds", "Seconds for each token after the first", _GAP_S
        )
        self._whole = histogram(
            "e2e_request_latency_seconds", "Seconds from submission to the last token", _REQUEST_S
        )
        self._queue = histogram(
            "request_queue_time_seconds", "Seconds from submission to the first step", _REQUEST_S
        )
        self._prefill = histogram(
            "request_prefill_time_seconds", "Seconds from the first step to the first token", _REQUEST_S
        )
        self._decode = histogram(
            "request_decode_time_seconds", "Seconds from the first token to the last", _REQUEST_S
        )
        self._inference = histogram(
            "request_inference_time_seconds", "Seconds from the first step to the last token", _REQUEST_S
        )
        self._prompt = histogram("request_prompt_tokens", "Tokens of a request's prompt", _TOKENS)
        self._generated = histogram("request_generation_tokens", "Tokens that a request generated", _TOKENS)
        self._computed = histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens of a request that no tier held", _TOKENS
        )
        self._limit = histogram(
            "request_params_max_tokens", "Tokens that a request may generate at most", _TOKENS
        )
        self._answers = histogram("request_params_n", "Answers that a prompt was to have", _ANSWERS)
        self._longest = histogram(
            "request_max_num_generation_tokens", "Tokens of the longest of a prompt's answers", _TOKENS
        )
        self._endings = _Endings(engine, model_name)
        registry.register(self._endings)

    def observe_prompt(self, answer_tokens: Sequence[int]) -> None:
        """Counts one prompt, all of whose answers have ended, by their tokens."""
        self._answers.observe(len(answer_tokens))
        self._longest.observe(max(answer_tokens))

    def observe(self, usage: Usage, reason: str, max_tokens: int) -> None:
        """Counts one request that has ended."""
        self._endings.count(reason)
        self._ttft.observe(usage.ttft_s)
        self._queue.observe(usage.queue_s)
        self._prefill.observe(usage.prefill_s)
        self._decode.observe(usage.decode_s)
        self._inference.observe(usage.prefill_s + usage.decode_s)
        self._whole.observe(usage.queue_s + usage.prefill_s + usage.decode_s)
        if usage.completion_tokens > 1:
            self._per_token.observe(usage.decode_s / (usage.completion_tokens - 1))
        self._prompt.observe(usage.prompt_tokens)
        self._generated.observe(usage.completion_tokens)
        self._computed.observe(usage.sources.computed)
        self._limit.observe(max_tokens)


class _Endings(Collector):
    """`vllm:request_success_total`: what the server saw end, and what the engine was told to abort."""

    def __init__(self, engine: EngineProtocol, model_name: str) -> None:
        self._engine = engine
        self._labels = vllm_labels(model_name)
        self._counts = {"stop": 0, "length": 0}

    def count(self, reason: str) -> None:
        if reason in self._counts:
            self._counts[reason] += 1

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        counts: dict[str, float] = {**self._counts}
        try:
            counts["abort"] = self._engine.stats().get("aborted", 0.0)
        except StrataError:
            return  # a count that is not known is left out: a lower one would look like a restart
        doc = "Requests that ended, by why"
        metric = CounterMetricFamily("vllm:request_success", doc, labels=(*LABEL_NAMES, "finished_reason"))
        for reason, count in counts.items():
            metric.add_metric((*self._labels, reason), count)
        yield metric
