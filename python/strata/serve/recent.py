"""What the server remembers of its requests: those that run, the last twenty, and how long tokens took.

A stream is watched while it is read: nothing is asked of the engine, and nothing of it waits. `watch` is called in a
worker thread, since it compares prompts; what happens for each chunk is a few additions.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from strata.engine.api import TIERS, Chunk, GenerationRequest, Progress, RequestStream, TokenSources, Usage
from strata.errors import StrataError
from strata.serve.divergence import Comparison, EarlierPrompts, Kept
from strata.serve.request_id import current_request_id

SHOWN = 20
SOURCES = (*TIERS, "computed")
_MOST_TIMES = 1024


class Times:
    """The latest durations of one kind, in seconds."""

    def __init__(self) -> None:
        self._values: npt.NDArray[np.float64] = np.zeros(_MOST_TIMES)
        self.count = 0
        """All that were ever added."""

    def add(self, seconds: float) -> None:
        """Takes one in, in place of the oldest."""
        self._values[self.count % _MOST_TIMES] = seconds
        self.count += 1

    def percentiles(self) -> tuple[float, float] | None:
        """P50 and P99 of those that are kept; None if there is none."""
        values = self._values[: min(self.count, _MOST_TIMES)]
        if not len(values):
            return None
        middle, high = np.percentile(values, (50, 99))
        return float(middle), float(high)


@dataclass(eq=False)
class Entry:
    """One request as the server saw it. Durations are seconds; `since` is the wall clock's."""

    number: int
    prompt_tokens: int
    scored: bool
    """Whether log probabilities of the prompt were asked for: then all of it is computed."""
    comparison: Comparison
    client_id: str | None = None
    """What `x-request-id` said or got."""
    since: float = field(default_factory=time.time)
    began: float = field(default_factory=time.monotonic)
    ttft_s: float | None = None
    total_s: float | None = None
    """None while it runs."""
    saved_s: float = 0.0
    generated: int = 0
    finish_reason: str | None = None
    """`stop`, `length`, `abort`, or the sentence of an error; `error` where nothing of a prompt may be shown."""
    sources: TokenSources | None = None


class Recent:
    """The requests of one server. `excerpts` allows texts of prompts in what is remembered. `on_read` is called in the
    event loop that begins to read a stream."""

    def __init__(self, excerpts: bool, on_read: Callable[[], None]) -> None:
        self.on_read = on_read
        self.ttft = {source: Times() for source in SOURCES}
        """By where most of the prompt came from."""
        self.gaps = Times()
        """Between two chunks with tokens of one stream."""
        self.saved_s = 0.0
        self._earlier = EarlierPrompts(excerpts)
        self._excerpts = excerpts
        self._last: deque[Entry] = deque(maxlen=SHOWN)
        self._running: dict[int, Watched] = {}

    def watch(self, stream: RequestStream, request: GenerationRequest) -> Watched:
        """Remembers a request from here on. The stream that comes back must be read, or aborted, in its place."""
        kept = Kept(stream.request_id, request.cache_salt, stream.prompt)
        scored = request.sampling.prompt_logprobs is not None
        entry = Entry(stream.request_id, len(stream.prompt), scored, self._earlier.add(kept))
        watched = Watched(stream, kept, entry, self)
        self._running[entry.number] = watched
        self._last.append(entry)
        return watched

    def running(self) -> list[Watched]:
        """Requests that have not ended, the oldest first; also those that the engine lets wait."""
        return list(self._running.copy().values())

    def last(self) -> list[Entry]:
        """The last requests, the latest first, ended or not."""
        return list(reversed(self._last.copy()))

    def finished(self, entry: Entry, usage: Usage, whole: bool) -> None:
        """An answer came to its end; `whole` unless it was cut."""
        entry.sources, entry.saved_s = usage.sources, usage.saved_s
        entry.generated = usage.completion_tokens
        self.saved_s += max(0.0, usage.saved_s)
        if whole:
            entry.ttft_s = usage.ttft_s
            self.ttft[main_source(usage.sources)].add(usage.ttft_s)

    def ended(self, watched: Watched, reason: str) -> None:
        """A request is over. Idempotent: the first reason counts."""
        entry = watched.entry
        if self._running.pop(entry.number, None) is None:
            return
        entry.total_s, entry.finish_reason = time.monotonic() - entry.began, reason
        entry.sources = entry.sources or watched.progress().sources

    def flushed(self) -> None:
        """The cache was flushed: later prompts may miss because of that."""
        self._earlier.flushed()

    def failed(self, watched: Watched, error: StrataError) -> None:
        """A request ended with an error, whose sentence may quote what the client sent."""
        self.ended(watched, str(error) if self._excerpts else "error")


class Watched:
    """A `RequestStream` that tells `Recent` what comes through it."""

    def __init__(self, stream: RequestStream, kept: Kept, entry: Entry, recent: Recent) -> None:
        self.request_id = stream.request_id
        self.prompt = stream.prompt
        self.entry = entry
        self._stream = stream
        self._kept = kept
        self._recent = recent
        self._newest = 0.0

    def __iter__(self) -> Iterator[Chunk]:
        try:
            for chunk in self._stream:
                self._take(chunk)
                yield chunk
        except StrataError as error:
            self._recent.failed(self, error)
            raise

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        # Known here, and not in the worker that submitted.
        self.entry.client_id = current_request_id() or None
        self._recent.on_read()
        try:
            async for chunk in self._stream:
                self._take(chunk)
                yield chunk
        except StrataError as error:
            self._recent.failed(self, error)
            raise

    def abort(self) -> None:
        """Ends the request early; what was not read to its end counts as aborted."""
        self._recent.ended(self, "abort")
        self._stream.abort()

    def progress(self) -> Progress:
        """How far the prompt is."""
        return self._stream.progress()

    def _take(self, chunk: Chunk) -> None:
        entry, now = self.entry, time.monotonic()
        if chunk.token_ids:
            self._kept.answer.extend(chunk.token_ids)
            if entry.ttft_s is None:
                entry.ttft_s = now - entry.began
            else:
                self._recent.gaps.add(now - self._newest)
            self._newest = now
            entry.generated += len(chunk.token_ids)
        if chunk.finish_reason is not None:
            if chunk.usage is not None:
                self._recent.finished(entry, chunk.usage, whole=chunk.finish_reason != "abort")
            self._recent.ended(self, chunk.finish_reason)


def main_source(sources: TokenSources) -> str:
    """Where most of a prompt came from; the slower of two that gave as much."""
    return max(reversed(SOURCES), key=lambda source: getattr(sources, source))
