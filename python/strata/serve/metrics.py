"""`/metrics`: what only the HTTP side knows, beside the engine's and its requests' metrics.

The registry belongs to the server, so that two of them in one process do not mix.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from strata import __version__
from strata.config import StrataConfig
from strata.engine.api import TIERS, EngineProtocol, Usage
from strata.serve.engine_metrics import EngineCollector
from strata.serve.request_metrics import RequestMetrics

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)


class ServerMetrics:
    """The server's own counters beside a view of the engine's."""

    def __init__(self, engine: EngineProtocol, config: StrataConfig) -> None:
        self._registry = registry = CollectorRegistry()
        model_name = config.model.names(engine.model_name)[0]
        registry.register(EngineCollector(engine, model_name, config.cache.page_size))
        self.requests = RequestMetrics(engine, model_name, registry)
        ProcessCollector(registry=registry)
        build = Gauge("strata_build_info", "The version that runs", ["version"], registry=registry)
        build.labels(__version__).set(1)
        self._ready = Gauge(
            "strata_ready", "Whether /ready says that new requests are welcome", registry=registry
        )
        self.http_requests = Counter(
            "strata_http_requests", "HTTP requests answered", ["route", "status"], registry=registry
        )
        self.http_seconds = Histogram(
            "strata_http_request_seconds",
            "Seconds from a request's first byte to its answer's last",
            ["route"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.ttft_seconds = Histogram(
            "strata_time_to_first_token_seconds",
            "Seconds from submission to the first token",
            buckets=_SECONDS,
            registry=registry,
        )
        self.ttft_by_source = Histogram(
            "strata_time_to_first_token_by_source_seconds",
            "Seconds from submission to the first token, by where most of the prompt came from",
            ["source"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.saved_seconds = Counter(
            "strata_prefill_saved_seconds",
            "Estimated prefill seconds that cached tokens saved",
            registry=registry,
        )
        self.finished = Counter(
            "strata_requests_finished", "Requests by how they ended", ["reason"], registry=registry
        )
        self.cut = Counter(
            "strata_answers_cut", "Answers whose client left, or that a stop cut", registry=registry
        )

    def observe(self, usage: Usage, reason: str, max_tokens: int) -> None:
        """Counts one finished request, whose answer might have had `max_tokens`. What was cut short says nothing about
        times and lengths."""
        self.finished.labels(reason).inc()
        if reason == "abort":
            return
        self.requests.observe(usage, reason, max_tokens)
        self.ttft_seconds.observe(usage.ttft_s)
        self.ttft_by_source.labels(main_source(usage)).observe(usage.ttft_s)
        self.saved_seconds.inc(max(0.0, usage.saved_s))

    def watch_readiness(self, ready: Callable[[], bool]) -> None:
        """From now on `strata_ready` says what `ready` says."""
        self._ready.set_function(lambda: float(ready()))

    def render(self) -> bytes:
        """All metrics in Prometheus' text form. Asks the engine, so it may block."""
        return generate_latest(self._registry)


def main_source(usage: Usage) -> str:
    """Where most of a prompt's tokens came from; of two that gave as many, the slower one."""
    return max(("computed", *reversed(TIERS)), key=lambda source: getattr(usage.sources, source))


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
        except Exception:
            # Answered outside of every middleware.
            status = "500" if status == "none" else status
            raise
        finally:
            # An unmatched path is not a label: anyone could make any number of them.
            route = getattr(scope.get("route"), "path", "other")
            self._metrics.http_requests.labels(route, status).inc()
            self._metrics.http_seconds.labels(route).observe(time.monotonic() - start)
