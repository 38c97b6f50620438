"""What the scheduler may not cost: requests that share a prefix on the device, beside the same engine without deferral,
and a host hit beside decoding streams, beside the same under first come, first served.

Both sides of a pair are engines of one process over one model, and take turns in being first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from statistics import mean
from typing import Any

from strata.bench.report import Steps
from strata.bench.target import EngineTarget, wait_for
from strata.bench.tiers import DEVICE_MEMORY, targets, warm_up, with_cache
from strata.config import StrataConfig
from strata.engine import GenerationRequest, SamplingParams
from strata.engine.api import RequestStream
from strata.engine.served_model import ServedModel
from strata.errors import StorageError

STEADY_TOKENS = 4
"""Each stream has decoded so many before the host hit arrives."""
_ANSWER_TOKENS = 2


@dataclass(frozen=True)
class Side:
    """One side of a pair. Seconds; `deferred` counts once a decision and request, `stall_s` is the model's wait for
    loads, `gap_s` the longest between two tokens of a stream, 0 without streams."""

    ttft_s: float
    deferred: int = 0
    stall_s: float = 0.0
    gap_s: float = 0.0


@dataclass(frozen=True)
class Pair:
    """The default scheduler beside what it is compared with."""

    ours: Side
    theirs: Side

    @property
    def ratio(self) -> float:
        """TTFT over TTFT."""
        return self.ours.ttft_s / self.theirs.ttft_s


def with_scheduler(config: StrataConfig, **changes: Any) -> StrataConfig:
    """The same settings with another scheduler."""
    return replace(config, scheduler=replace(config.scheduler, **changes))


def roomy(config: StrataConfig) -> StrataConfig:
    """A device and a host that hold what a section asks, and no disk."""
    return with_cache(config, device_memory=DEVICE_MEMORY, host_memory=DEVICE_MEMORY, disk_capacity=0)


# --- sharers ------------------------------------------------------------------------------------------------------


def sharers(
    config: StrataConfig,
    served: ServedModel,
    prefix: Sequence[int],
    questions: Sequence[Sequence[Sequence[int]]],
    steps: Steps,
) -> list[Pair]:
    """A pair for each entry of `questions`: all of its questions about a prefix on the device, at once. `ttft_s` is
    their mean."""
    ours, theirs = (
        with_scheduler(config, policy="adaptive"),
        with_scheduler(config, policy="adaptive", scheduler_off="defer"),
    )
    pairs = []
    with targets(served, roomy(ours), roomy(theirs)) as sides:
        for side in sides:
            warm_up(side, prefix)
            side.ask(prefix, 1)
            side.settle()
        for index, asked in enumerate(questions):
            steps.next(f"sharers, pair {index + 1}")
            pairs.append(_pair(index, sides, partial(_together, prefix=prefix, questions=asked)))
    return pairs


def _together(side: EngineTarget, prefix: Sequence[int], questions: Sequence[Sequence[int]]) -> Side:
    before = side.engine.stats()
    with ThreadPoolExecutor(len(questions)) as readers:
        reading = [_read(side, [*prefix, *question], _ANSWER_TOKENS, readers)[1] for question in questions]
        spans = [times.result()[0] for times in reading]
    side.settle()
    after = side.engine.stats()
    computed = after["prompt_tokens_computed"] - before["prompt_tokens_computed"]
    most = sum(len(question) + side.config.cache.page_size for question in questions)
    if computed > most:
        raise StorageError(
            f"the prefix was to be on the device, but {computed:.0f} tokens were computed where {most} are the "
            "questions': --tokens is too long for the device tier"
        )
    return Side(mean(spans), int(after["deferred_rounds"] - before["deferred_rounds"]))


# --- a host hit beside decoding streams ---------------------------------------------------------------------------


def host_hit(
    config: StrataConfig,
    served: ServedModel,
    prompts: Sequence[Sequence[int]],
    streams: Sequence[Sequence[int]],
    stream_tokens: int,
    steps: Steps,
) -> list[Pair]:
    """A pair for each prompt, which the host alone holds when it is asked for while all streams decode."""
    pairs = []
    ours, theirs = (roomy(with_scheduler(config, policy=policy)) for policy in ("adaptive", "fcfs"))
    with targets(served, ours, theirs) as sides:
        for side in sides:
            warm_up(side, prompts[0])
        for index, prompt in enumerate(prompts):
            steps.next(f"host hit, pair {index + 1}")
            for side in sides:
                side.ask(prompt, 1)
                side.settle()
            asked = partial(_beside, prompt=prompt, streams=streams, stream_tokens=stream_tokens)
            pairs.append(_pair(index, sides, asked))
    return pairs


def _beside(
    side: EngineTarget, prompt: Sequence[int], streams: Sequence[Sequence[int]], stream_tokens: int
) -> Side:
    side.demote(["device"])
    with _decoding(side, streams, stream_tokens) as decoding:
        before = side.engine.stats()
        answer = side.ask(prompt, _ANSWER_TOKENS)
        after = side.engine.stats()
        if any(times.done() for times in decoding):
            raise StorageError("a stream ended before the host hit was answered; raise --stream-tokens")
    side.settle()
    gaps = [max(later - sooner for sooner, later in pairwise(times)) for times in _times(decoding)]
    if answer.sources.host + answer.sources.device < len(prompt) - 2 * side.config.cache.page_size:
        raise StorageError(
            f"a prompt of {len(prompt)} tokens was to lie in host memory, but {answer.sources} came: with "
            "--load-policy always it is loaded however slow the link"
        )
    stalled = after["load_stall_ns"] - before["load_stall_ns"]
    return Side(
        answer.ttft_s, int(after["deferred_rounds"] - before["deferred_rounds"]), stalled / 1e9, max(gaps)
    )


@contextmanager
def _decoding(
    side: EngineTarget, prompts: Sequence[Sequence[int]], most_tokens: int
) -> Iterator[list[Future[list[float]]]]:
    """Streams that have decoded for a while, aborted at the end."""
    with ThreadPoolExecutor(len(prompts)) as readers:
        started = side.engine.stats()["generated_tokens"]
        begun = [_read(side, prompt, most_tokens, readers) for prompt in prompts]
        try:
            wanted = started + STEADY_TOKENS * len(prompts)
            wait_for(
                lambda: side.engine.stats()["generated_tokens"] >= wanted,
                "the streams did not begin to decode",
            )
            yield [times for _, times in begun]
        finally:
            for stream, _ in begun:
                stream.abort()


# --- both ---------------------------------------------------------------------------------------------------------


def _pair(index: int, sides: Sequence[EngineTarget], measure: Callable[[EngineTarget], Side]) -> Pair:
    """Both sides, in an order that alternates."""
    order = (0, 1) if index % 2 == 0 else (1, 0)
    found = {number: measure(sides[number]) for number in order}
    return Pair(found[0], found[1])


def _read(
    side: EngineTarget, prompt: Sequence[int], max_tokens: int, readers: ThreadPoolExecutor
) -> tuple[RequestStream, Future[list[float]]]:
    """A request, and the seconds from before it was handed over to each of its pieces, read by a thread."""
    start = time.perf_counter()
    stream = side.engine.submit(
        GenerationRequest(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    )

    def times() -> list[float]:
        return [time.perf_counter() - start for chunk in stream if chunk.token_ids]

    return stream, readers.submit(times)


def _times(reading: Sequence[Future[list[float]]]) -> list[list[float]]:
    return [times.result() for times in reading]
