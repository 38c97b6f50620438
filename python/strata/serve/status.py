"""`GET /status`: all that the page at `/` shows, in one JSON object. Every number on the page is in here.

Times are seconds, sizes bytes. Counts of tokens and what is called a total count from the start of the server.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel

from strata import __version__
from strata.engine.api import TIERS, TierReport, TokenSources
from strata.serve.divergence import Comparison, is_whole, why
from strata.serve.history import POINT_S
from strata.serve.notes import start_notes
from strata.serve.observer import LINKS, Observer
from strata.serve.recent import SOURCES, Entry, Times, Watched
from strata.serve.service import Service

MOST_LISTED = 50
"""Running and waiting requests that are listed; all are counted."""
_RATE_S = 10.0
_STALL_S = 60.0


class Sources(BaseModel):
    """Prompt tokens by where their KV came from. `computed` came from no tier."""

    device: int = 0
    host: int = 0
    disk: int = 0
    computed: int = 0


class Running(BaseModel):
    """A request that is being answered. It waits until the engine has taken it in, then its prompt is computed
    (`prefill`), then its answer (`decode`). `remaining_s` is an estimate for the prompt."""

    request_id: int
    client_id: str | None
    phase: Literal["waiting", "prefill", "decode"]
    age_s: float
    prompt_tokens: int
    done_tokens: int
    remaining_s: float | None
    generated_tokens: int
    sources: Sources | None


class Waiting(BaseModel):
    """A request in the queue, and why it waits."""

    request_id: int
    waited_s: float
    why: str


class Series(BaseModel):
    """What came in each `seconds_per_point` of the last minutes, the present ones last: prompt tokens by where they
    came from, generated tokens, and the prefill seconds that cached tokens saved. Cached tokens come when their request
    is admitted, computed ones with the step that computes them, again where a preemption made that necessary."""

    seconds_per_point: float
    device: list[float]
    host: list[float]
    disk: list[float]
    computed: list[float]
    generated: list[float]
    saved_s: list[float]


class Quantiles(BaseModel):
    """Of the latest 1,024 at most; None where there was none yet. `count` is a total."""

    count: int
    p50_s: float | None
    p99_s: float | None


class Tier(BaseModel):
    """One tier. `hit_tokens` are prompt tokens that it served, `evicted_pages` a total."""

    name: str
    up: bool
    capacity_bytes: int
    used_bytes: int
    pinned_bytes: int
    used_tokens: int
    hit_tokens: int
    evicted_pages: int
    detail: str
    off_reason: str | None


class Link(BaseModel):
    """What moves between two tiers. `bytes_per_s` is the mean of the last 10 s, `limit_bytes_per_s` what the cost model
    has measured this way to give at most; None while it is not known."""

    name: str
    of: str
    to: str
    bytes_per_s: float
    limit_bytes_per_s: float | None
    bytes_total: int


class Fault(BaseModel):
    """Something that went wrong, and how often. Strata serves on; faults that are 0 are left out."""

    what: str
    count: int


class Divergence(BaseModel):
    """Where a prompt that was not found as a whole parts from an earlier one: `token` tokens are the same. Texts are a
    few tokens around that place, None with `--prompt-excerpts false`."""

    token: int
    request_id: int
    before: str | None
    here: str | None
    there: str | None


class LastRequest(BaseModel):
    """One of the last requests. `finish_reason` is None while it runs, or the sentence of an error. `why` says why not
    more of its prompt was cached."""

    request_id: int
    client_id: str | None
    unix_s: float
    prompt_tokens: int
    generated_tokens: int
    sources: Sources | None
    ttft_s: float | None
    total_s: float | None
    saved_s: float
    finish_reason: str | None
    why: str | None
    divergence: Divergence | None


class Status(BaseModel):
    """The server at one moment. `problems` and `notes` are sentences for the operator; `stall_share` is the part of the
    last minute in which a step waited for a load."""

    unix_s: float
    uptime_s: float
    version: str
    model: str
    context_tokens: int
    page_tokens: int
    ok: bool
    ready: bool
    problems: list[str]
    notes: list[str]
    running_count: int
    running: list[Running]
    waiting_count: int
    waiting: list[Waiting]
    prompt_tokens: Sources
    generated_tokens: int
    saved_s: float
    series: Series
    ttft: dict[str, Quantiles]
    token_gaps: Quantiles
    tiers: list[Tier]
    links: list[Link]
    stall_share: float
    faults: list[Fault]
    requests: list[LastRequest]


_ENDS = {
    "load": ("host", "device"),
    "backup": ("device", "host"),
    "prefetch": ("disk", "host"),
    "spill": ("host", "disk"),
}
_FAULTS = {
    "corrupt_records": "damaged records found on disk; their pages were computed again",
    "disk_checksum_failures": "checksums that did not match what the disk gave back",
    "disk_io_errors": "failed reads and writes of the disk",
    "plans_discarded": "steps that failed and were computed again",
    "completions_lost": "transfers whose end was never reported",
    "unknown_completions": "ends reported of transfers that nobody waited for",
    **{f"{link}_failed": f"failed transfers: {link}" for link in LINKS},
    **{
        f"{tier}_quarantined_pages": f"pages out of use in the {tier} tier"
        for tier in ("device", "host", "disk")
    },
}


def status_of(service: Service) -> Status:
    """Asks the engine and puts the answer together. Blocks for a moment."""
    engine, observer = service.engine, service.observer
    stats, health = observer.stats(), engine.health()
    # A stopped engine has no queue to explain; what else is known is worth showing.
    waiting = engine.waiting() if health.ok else []
    running = observer.recent.running()
    found = {each.entry.number: each.progress().sources for each in running}
    return Status(
        unix_s=time.time(),
        uptime_s=time.monotonic() - observer.began,
        version=__version__,
        model=service.model_name,
        context_tokens=engine.max_context,
        page_tokens=service.config.cache.page_size,
        ok=health.ok,
        ready=service.readiness().ready,
        problems=list(health.problems),
        notes=start_notes(engine, service.config),
        running_count=int(stats.get("running", 0)),
        running=[_running(each) for each in running[:MOST_LISTED]],
        waiting_count=int(stats.get("waiting", 0)),
        waiting=[
            Waiting(request_id=each.request_id, waited_s=each.waited_s, why=each.why)
            for each in waiting[:MOST_LISTED]
        ],
        prompt_tokens=Sources(**{name: int(stats.get(f"prompt_tokens_{name}", 0)) for name in SOURCES}),
        generated_tokens=int(stats.get("generated_tokens", 0)),
        saved_s=observer.recent.saved_s,
        series=_series(observer),
        ttft={source: _quantiles(times) for source, times in observer.recent.ttft.items()},
        token_gaps=_quantiles(observer.recent.gaps),
        tiers=[_tier(each, stats) for each in engine.tiers()],
        links=[_link(name, observer, stats) for name in LINKS],
        stall_share=_stall_share(observer),
        faults=[
            Fault(what=what, count=int(stats[name]))
            for name, what in _FAULTS.items()
            if stats.get(name, 0) > 0
        ],
        requests=[
            _last(each, each.sources or found.get(each.number), service) for each in observer.recent.last()
        ],
    )


def _running(watched: Watched) -> Running:
    entry, progress = watched.entry, watched.progress()
    decodes = entry.generated > 0
    phase: Literal["waiting", "prefill", "decode"] = (
        "decode" if decodes else "waiting" if progress.sources is None else "prefill"
    )
    return Running(
        request_id=entry.number,
        client_id=entry.client_id,
        phase=phase,
        age_s=time.monotonic() - entry.began,
        prompt_tokens=progress.prompt_tokens,
        done_tokens=progress.done_tokens,
        remaining_s=progress.remaining_s,
        generated_tokens=entry.generated,
        sources=_sources(progress.sources),
    )


def _series(observer: Observer) -> Series:
    points = observer.history.points
    return Series(
        seconds_per_point=POINT_S,
        **{tier: points(f"prompt_tokens_{tier}") for tier in TIERS},
        computed=points("prefilled_tokens"),
        generated=points("generated_tokens"),
        saved_s=points("saved_s"),
    )


def _quantiles(times: Times) -> Quantiles:
    found = times.percentiles() or (None, None)
    return Quantiles(count=times.count, p50_s=found[0], p99_s=found[1])


def _tier(report: TierReport, stats: dict[str, float]) -> Tier:
    return Tier(
        name=report.name,
        up=report.enabled,
        capacity_bytes=report.capacity_bytes,
        used_bytes=report.used_bytes,
        pinned_bytes=report.pinned_bytes,
        used_tokens=report.used_tokens,
        hit_tokens=int(stats.get(f"prompt_tokens_{report.name}", 0)),
        evicted_pages=int(stats.get(f"{report.name}_evicted_pages", 0)),
        detail=report.detail,
        off_reason=report.off_reason,
    )


def _link(name: str, observer: Observer, stats: dict[str, float]) -> Link:
    grown, seconds = observer.history.growth(f"{name}_bytes", _RATE_S)
    of, to = _ENDS[name]
    return Link(
        name=name,
        of=of,
        to=to,
        bytes_per_s=grown / seconds if seconds else 0.0,
        limit_bytes_per_s=stats.get(f"cost_{name}_bytes_per_s"),
        bytes_total=int(stats.get(f"{name}_bytes", 0)),
    )


def _stall_share(observer: Observer) -> float:
    stalled_ns, seconds = observer.history.growth("load_stall_ns", _STALL_S)
    return min(1.0, stalled_ns / 1e9 / seconds) if seconds else 0.0


def _last(entry: Entry, sources: TokenSources | None, service: Service) -> LastRequest:
    comparison, page_size = entry.comparison, service.config.cache.page_size
    missed = not entry.scored and (sources is None or not is_whole(sources, page_size))
    sentence = None if sources is None else why(sources, page_size, comparison)
    if entry.scored:
        sentence = "computed as a whole, since log probabilities of its prompt were asked for"
    return LastRequest(
        request_id=entry.number,
        client_id=entry.client_id,
        unix_s=entry.since,
        prompt_tokens=entry.prompt_tokens,
        generated_tokens=entry.generated,
        sources=_sources(sources),
        ttft_s=entry.ttft_s,
        total_s=entry.total_s,
        saved_s=entry.saved_s,
        finish_reason=entry.finish_reason,
        why=sentence,
        divergence=_divergence(comparison, service.engine.tokenizer) if missed else None,
    )


def _divergence(comparison: Comparison, tokenizer: Any) -> Divergence | None:
    """None where no earlier prompt begins alike, or one goes on where the other ends."""
    ended = comparison.shared >= comparison.other_length
    if comparison.other is None or ended:
        return None
    excerpt = comparison.excerpt
    texts: Sequence[str | None] = (None, None, None)
    if excerpt is not None and tokenizer is not None:
        decode: Callable[[list[int], bool], str] = tokenizer.decode
        # With the special tokens: they are often what differs.
        texts = [decode(list(ids), False) for ids in (excerpt.before, excerpt.here, excerpt.there)]
    before, here, there = texts
    return Divergence(
        token=comparison.shared, request_id=comparison.other, before=before, here=here, there=there
    )


def _sources(sources: TokenSources | None) -> Sources | None:
    if sources is None:
        return None
    return Sources(**{name: getattr(sources, name) for name in SOURCES})


def status_router(service: Service) -> APIRouter:
    """The route, bound to a service."""
    router = APIRouter()

    @router.get("/status")
    async def status() -> Status:
        """The server at this moment, and its last five minutes."""
        service.observer.looked()
        return await service.call(status_of, service)

    return router
