"""`/metrics`: the engine's counters and gauges, read when asked for, and what only the HTTP side knows.

The registry belongs to the server, so that two of them in one process do not mix.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from strata.engine.api import TIERS, EngineProtocol, Usage

_GAUGES = re.compile(
    r"running|waiting|held|transfers_in_flight|page_bytes|prefill_tokens_per_s|disk_usage_bytes|disk_segments"
    r"|\w+_(capacity|used|resident|pinned|quarantined)_pages|disk_up|disk_out_of_service|cost_\w+"
)
"""Names of `engine.stats()` that go up and down; all others only grow."""

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)
_SOURCES = (*TIERS, "computed")
_MOVES = ("load", "backup", "spill", "prefetch", "erase")
_MOVE_FIELDS = ("started", "completed", "failed", "cancelled", "pages", "bytes", "busy_ns", "skipped_pages")


class ServerMetrics:
    """The server's own counters beside a view of the engine's."""

    def __init__(self, engine: EngineProtocol) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(engine))
        self.http_requests = Counter(
            "strata_http_requests", "HTTP requests answered", ["route", "status"], registry=self._registry
        )
        self.http_seconds = Histogram(
            "strata_http_request_seconds",
            "Seconds from a request's first byte to its answer's last",
            ["route"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.ttft_seconds = Histogram(
            "strata_time_to_first_token_seconds",
            "Seconds from submission to the first token",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.saved_seconds = Counter(
            "strata_prefill_saved_seconds",
            "Estimated prefill seconds that cached tokens saved",
            registry=self._registry,
        )
        self.finished = Counter(
            "strata_requests_finished", "Requests by how they ended", ["reason"], registry=self._registry
        )
        self.cut = Counter(
            "strata_answers_cut", "Answers whose client left, or that a stop cut", registry=self._registry
        )

    def observe(self, usage: Usage, reason: str) -> None:
        """Counts one finished request."""
        self.finished.labels(reason).inc()
        self.ttft_seconds.observe(usage.ttft_s)
        self.saved_seconds.inc(max(0.0, usage.saved_s))

    def render(self) -> bytes:
        """All metrics in Prometheus' text form. Asks the engine, so it may block."""
        return generate_latest(self._registry)


class EngineCollector(Collector):
    """Turns `engine.stats()` and `engine.tiers()` into metrics at the moment of a scrape."""

    def __init__(self, engine: EngineProtocol) -> None:
        self._engine = engine

    def describe(self) -> list[Metric]:
        """Nothing: the engine's names are not known before it is asked."""
        return []

    def collect(self) -> Iterator[Metric]:
        """One metric for each entry; what is counted by source or by kind of transfer becomes labels."""
        stats = dict(self._engine.stats())
        names = {source: f"prompt_tokens_{source}" for source in _SOURCES}
        yield _labelled(stats, "prompt_tokens", "source", names, "Prompt tokens by where their KV came from")
        for field in _MOVE_FIELDS:
            names = {move: f"{move}_{field}" for move in _MOVES}
            doc = f"Transfers between tiers: {field.replace('_', ' ')}"
            yield _labelled(stats, f"transfer_{field}", "move", names, doc)
        yield _hit_ages(stats)
        for name, value in sorted(stats.items()):
            family = GaugeMetricFamily if _GAUGES.fullmatch(name) else CounterMetricFamily
            metric = family(f"strata_{name}", f"Engine: {name.replace('_', ' ')}")
            metric.add_metric([], value)
            yield metric
        yield from self._tiers()

    def _tiers(self) -> Iterator[Metric]:
        reports = self._engine.tiers()
        for name in ("capacity_bytes", "used_bytes", "pinned_bytes", "used_tokens"):
            metric = GaugeMetricFamily(
                f"strata_tier_{name}", f"Tier: {name.replace('_', ' ')}", labels=["tier"]
            )
            for report in reports:
                metric.add_metric([report.name], getattr(report, name))
            yield metric


def _hit_ages(stats: dict[str, float]) -> Metric:
    """Takes the engine's classes of hit ages out of `stats` and makes one histogram of them."""
    prefix = "hit_age_le_"
    ends = sorted(int(name.removeprefix(prefix)) for name in stats if name.startswith(prefix))
    buckets = [(str(float(end)), stats.pop(f"{prefix}{end}")) for end in ends]
    buckets.append(("+Inf", stats.pop("hit_age_count", 0.0)))
    metric = HistogramMetricFamily(
        "strata_hit_age_seconds", "Seconds since the pages of a hit were last used"
    )
    metric.add_metric([], buckets, stats.pop("hit_age_sum_s", 0.0))
    return metric


def _labelled(stats: dict[str, float], name: str, label: str, entries: dict[str, str], doc: str) -> Metric:
    """Takes entries (by label value) out of `stats` and makes one counter of them."""
    metric = CounterMetricFamily(f"strata_{name}", doc, labels=[label])
    for value, entry in entries.items():
        metric.add_metric([value], stats.pop(entry, 0.0))
    return metric


class HttpMetrics:
    """ASGI middleware that counts and times every request by route and status."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.monotonic()
        status = "none"

        async def watched_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        finally:
            # An unmatched path is not a label: anyone could make any number of them.
            route = getattr(scope.get("route"), "path", "other")
            self._metrics.http_requests.labels(route, status).inc()
            self._metrics.http_seconds.labels(route).observe(time.monotonic() - start)
