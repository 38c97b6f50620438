"""What the engine knows, as metrics, read at the moment of a scrape: everything under `strata_`, and under vLLM's names
what vLLM has a name for, so that dashboards and routers made for it work here.

An engine that has stopped is a metric too (`strata_engine_alive` 0), never a failed scrape.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from strata.engine.api import (
    TIERS,
    WAITING_KINDS,
    EngineProtocol,
    Health,
    TierReport,
    WaitingReport,
)
from strata.errors import StrataError

_GAUGES = re.compile(
    r"running|waiting|held|transfers_in_flight|page_bytes|prefill_tokens_per_s|disk_usage_bytes|disk_segments"
    r"|\w+_(capacity|used|resident|pinned|quarantined)_pages|disk_up|disk_out_of_service|cost_\w+"
)
"""Names of `engine.stats()` that go up and down; all others only grow."""

_SOURCES = (*TIERS, "computed")
_MOVES = ("load", "backup", "spill", "prefetch", "erase")
_MOVE_FIELDS = ("started", "completed", "failed", "cancelled", "pages", "bytes", "busy_ns", "skipped_pages")

_VLLM_SOURCES = {
    "local_compute": ("computed",),
    "local_cache_hit": ("device",),
    "external_kv_transfer": ("host", "disk"),
}
"""vLLM's sources of prompt tokens: the tiers below the device are what its offloading connectors are there."""

_VLLM_DEFERRED = frozenset({"loads", "held", "deferred", "taken_over", "set_aside"})
"""Kinds of waiting that vLLM calls deferred, since room alone would not help; the others wait for capacity."""

Labels = tuple[str, str]
"""vLLM's labels of every metric: the model's name, and the number of the engine, of which there is one."""

LABEL_NAMES = ("model_name", "engine")


def vllm_labels(model_name: str) -> Labels:
    """The values of `LABEL_NAMES`."""
    return model_name, "0"


@dataclass(frozen=True)
class EngineView:
    """Everything that is asked of the engine for one scrape."""

    stats: dict[str, float]
    tiers: list[TierReport]
    waiting: list[WaitingReport]


class EngineCollector(Collector):
    """Turns what the engine says into metrics."""

    def __init__(self, engine: EngineProtocol, model_name: str, page_size: int) -> None:
        self._engine = engine
        self._labels = vllm_labels(model_name)
        self._page_size = page_size

    def describe(self) -> list[Metric]:
        """Nothing: the engine's names are not known before it is asked."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Whether it lives, then what it says; nothing more of an engine that has stopped and cannot say."""
        engine = self._engine
        yield from _health(engine.health())
        try:
            view = EngineView(dict(engine.stats()), engine.tiers(), engine.waiting())
        except StrataError:
            return
        yield from self._vllm(view)
        yield from _strata(view)

    def _vllm(self, view: EngineView) -> Iterator[Metric]:
        """What `view` holds, under vLLM's names."""
        stats = view.stats
        deferred = sum(report.kind in _VLLM_DEFERRED for report in view.waiting)
        reasons = {"capacity": len(view.waiting) - deferred, "deferred": deferred}
        source_tokens = {
            name: sum(stats.get(f"prompt_tokens_{source}", 0.0) for source in sources)
            for name, sources in _VLLM_SOURCES.items()
        }
        prompt = sum(source_tokens.values())
        device, below = source_tokens["local_cache_hit"], source_tokens["external_kv_transfer"]
        in_use, capacity = _device_pages(stats)

        yield self._gauge("num_requests_running", "Requests that are running", stats.get("running", 0.0))
        yield self._gauge("num_requests_waiting", "Requests that wait", len(view.waiting))
        doc = "Requests that wait, by whether capacity is missing or something has to come first"
        yield self._by(GaugeMetricFamily, "num_requests_waiting_by_reason", doc, "reason", reasons)
        usage = in_use / capacity if capacity else 0.0
        yield self._gauge("kv_cache_usage_perc", "Part of the device tier that running requests hold", usage)
        yield self._counter("num_preemptions", "Preemptions", stats.get("preemptions", 0.0))
        yield self._counter("generation_tokens", "Tokens generated", stats.get("generated_tokens", 0.0))
        yield self._counter("prompt_tokens", "Prompt tokens of requests that were admitted", prompt)
        doc = "Prompt tokens by source; external are the host tier and the disk tier"
        yield self._by(CounterMetricFamily, "prompt_tokens_by_source", doc, "source", source_tokens)
        yield self._counter("prompt_tokens_cached", "Prompt tokens that some tier held", device + below)
        yield self._counter("prefix_cache_queries", "Prompt tokens looked up on the device", prompt)
        yield self._counter("prefix_cache_hits", "Prompt tokens found on the device", device)
        doc = "Prompt tokens looked up below the device"
        yield self._counter("external_prefix_cache_queries", doc, prompt - device)
        doc = "Prompt tokens that came from below the device"
        yield self._counter("external_prefix_cache_hits", doc, below)
        doc = "Block size and count of the device tier, as labels"
        labels = (*LABEL_NAMES, "block_size", "num_gpu_blocks")
        info = GaugeMetricFamily("vllm:cache_config_info", doc, labels=labels)
        info.add_metric((*self._labels, str(self._page_size), str(int(capacity))), 1)
        yield info
        yield _histogram(
            stats, "token_gap", "vllm:inter_token_latency_seconds", "Seconds between two tokens", self._labels
        )
        yield _histogram(
            stats, "step_tokens", "vllm:iteration_tokens_total", "Tokens computed in a step", self._labels
        )

    def _gauge(self, name: str, doc: str, value: float) -> Metric:
        metric = GaugeMetricFamily(f"vllm:{name}", doc, labels=LABEL_NAMES)
        metric.add_metric(self._labels, value)
        return metric

    def _counter(self, name: str, doc: str, value: float) -> Metric:
        metric = CounterMetricFamily(f"vllm:{name}", doc, labels=LABEL_NAMES)
        metric.add_metric(self._labels, value)
        return metric

    def _by(
        self,
        family: type[CounterMetricFamily] | type[GaugeMetricFamily],
        name: str,
        doc: str,
        label: str,
        values: Mapping[str, float],
    ) -> Metric:
        metric = family(f"vllm:{name}", doc, labels=(*LABEL_NAMES, label))
        for value, amount in values.items():
            metric.add_metric((*self._labels, value), amount)
        return metric


def _device_pages(stats: dict[str, float]) -> tuple[float, float]:
    """Pages of the device tier that nobody else can have now, and its pages. Cached pages that can be evicted are free
    to whoever needs them."""
    cached = stats.get("device_resident_pages", 0.0) - stats.get("device_pinned_pages", 0.0)
    return stats.get("device_used_pages", 0.0) - cached, stats.get("device_capacity_pages", 0.0)


def _health(health: Health) -> Iterator[Metric]:
    yield GaugeMetricFamily("strata_engine_alive", "Whether the engine answers requests", float(health.ok))
    doc = "Sentences under /health that an operator should read"
    yield GaugeMetricFamily("strata_problems", doc, float(len(health.problems)))


def _strata(view: EngineView) -> Iterator[Metric]:
    """One metric for each entry; what is counted by source, by kind of transfer or by reason becomes labels."""
    stats = view.stats
    names = {source: f"prompt_tokens_{source}" for source in _SOURCES}
    yield _labelled(stats, "prompt_tokens", "source", names, "Prompt tokens by where their KV came from")
    for field in _MOVE_FIELDS:
        names = {move: f"{move}_{field}" for move in _MOVES}
        doc = f"Transfers between tiers: {field.replace('_', ' ')}"
        yield _labelled(stats, f"transfer_{field}", "move", names, doc)
    doc = "Seconds since the pages of a hit were last used"
    yield _histogram(stats, "hit_age", "strata_hit_age_seconds", doc)
    for name, value in sorted(stats.items()):
        family = GaugeMetricFamily if _GAUGES.fullmatch(name) else CounterMetricFamily
        metric = family(f"strata_{name}", f"Engine: {name.replace('_', ' ')}")
        metric.add_metric([], value)
        yield metric
    yield from _tiers(view.tiers)
    kinds = Counter(report.kind for report in view.waiting)
    metric = GaugeMetricFamily(
        "strata_waiting_by_reason", "Requests by what they wait for", labels=["reason"]
    )
    for kind in WAITING_KINDS:
        metric.add_metric([kind], kinds[kind])
    yield metric


def _tiers(reports: list[TierReport]) -> Iterator[Metric]:
    for name in ("capacity_bytes", "used_bytes", "pinned_bytes", "used_tokens"):
        metric = GaugeMetricFamily(f"strata_tier_{name}", f"Tier: {name.replace('_', ' ')}", labels=["tier"])
        for report in reports:
            metric.add_metric([report.name], getattr(report, name))
        yield metric
    metric = GaugeMetricFamily("strata_tier_enabled", "Whether the tier is in service", labels=["tier"])
    for report in reports:
        metric.add_metric([report.name], float(report.enabled))
    yield metric


def _histogram(
    stats: dict[str, float], entry: str, name: str, doc: str, labels: Labels | tuple[()] = ()
) -> Metric:
    """Takes the engine's classes `ENTRY_le_END`, `ENTRY_count` and `ENTRY_sum`, of times `ENTRY_sum_s`, out of `stats`
    and makes one histogram of them."""
    prefix = f"{entry}_le_"
    ends = sorted((float(key.removeprefix(prefix)), key) for key in stats if key.startswith(prefix))
    buckets = [(str(end), stats.pop(key)) for end, key in ends]
    buckets.append(("+Inf", stats.pop(f"{entry}_count", 0.0)))
    metric = HistogramMetricFamily(name, doc, labels=LABEL_NAMES if labels else ())
    total = stats.pop(f"{entry}_sum", 0.0) + stats.pop(f"{entry}_sum_s", 0.0)
    metric.add_metric(labels, buckets, total)
    return metric


def _labelled(stats: dict[str, float], name: str, label: str, entries: dict[str, str], doc: str) -> Metric:
    """Takes entries (by label value) out of `stats` and makes one counter of them."""
    metric = CounterMetricFamily(f"strata_{name}", doc, labels=[label])
    for value, entry in entries.items():
        metric.add_metric([value], stats.pop(entry, 0.0))
    return metric
