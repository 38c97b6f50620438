"""What the tiers cost and what they bring, beside the same model with its tiers off: over a slow disk, with documents
that do not fit, and while tokens are decoded.

Sides take turns on the same prompts, and what came from where is checked or counted in every answer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from strata._core import CopyYardstick
from strata.bench.decode_command import engine_decode
from strata.bench.report import Steps, median
from strata.bench.target import Answer, EngineTarget
from strata.config import StrataConfig
from strata.engine.served_model import ServedModel
from strata.errors import StorageError

MIB = 1 << 20
MB = 1_000_000
DEVICE_MEMORY = 512 * MIB
CYCLE_HOST_MEMORY = 256 * MIB
DISK_CAPACITY = 4 << 30
_DEMOTE_S = 120.0
_COPIED_PIECE = 4096
_COPIED_BYTES = 64 * MIB


def with_cache(config: StrataConfig, **changes: Any) -> StrataConfig:
    """The same settings with other tiers."""
    return replace(config, cache=replace(config.cache, **changes))


def with_tiers(config: StrataConfig, folder: str, **changes: Any) -> StrataConfig:
    """Three tiers of a size that holds what a section asks, over a disk root of its own."""
    sizes: dict[str, Any] = {
        "device_memory": DEVICE_MEMORY,
        "host_memory": DEVICE_MEMORY,
        "disk_capacity": DISK_CAPACITY,
        "disk_path": config.cache.disk_path / folder,
    }
    return with_cache(config, **(sizes | changes))


def tiers_off(config: StrataConfig) -> StrataConfig:
    """A device tier alone: a prompt that is asked once is computed."""
    return with_cache(config, device_memory=DEVICE_MEMORY, host_memory=0, disk_capacity=0)


@contextmanager
def targets(served: ServedModel, *configs: StrataConfig) -> Iterator[list[EngineTarget]]:
    """An engine for each, stopped in any case."""
    with ExitStack() as stack:
        made = []
        for config in configs:
            made.append(EngineTarget(config, served))
            stack.callback(made[-1].close)
        yield made


# --- a slow disk --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SlowPair:
    """One prompt whose KV lay on the slow disk alone, beside the same prompt with the tiers off. Seconds, tokens."""

    ttft_s: float
    off_ttft_s: float
    disk_tokens: int
    recomputed_tokens: int
    tokens_equal: bool

    @property
    def ratio(self) -> float:
        """TTFT with the disk over TTFT without any cache."""
        return self.ttft_s / self.off_ttft_s


def fill_disk(config: StrataConfig, served: ServedModel, prompts: Sequence[Sequence[int]]) -> None:
    """Leaves the prompts' pages in the disk root, at the disk's real speed."""
    target = EngineTarget(with_cache(config, disk_bandwidth=0), served)
    try:
        for prompt in prompts:
            target.ask(prompt, 1)
            target.settle()
        target.engine.shutdown(drain_s=0.0, demote_s=_DEMOTE_S)
    finally:
        target.close()


def slow_disk(
    config: StrataConfig, served: ServedModel, prompts: Sequence[Sequence[int]], bandwidth: int, steps: Steps
) -> list[SlowPair]:
    """A pair a prompt, over a disk that reads and writes `bandwidth` bytes a second; the first right after a start."""
    slow = with_cache(config, disk_bandwidth=bandwidth)
    pairs = []
    with targets(served, slow, tiers_off(config)) as (on, off):
        warm_up(off, prompts[0])
        for index, prompt in enumerate(prompts):
            steps.next(f"disk of {bandwidth // MB} MB/s, pair {index + 1}")
            before = on.engine.stats()["recomputed_tokens_disk"]
            with_disk, without = in_turn(index, on, off, prompt)
            recomputed = on.engine.stats()["recomputed_tokens_disk"] - before
            if with_disk.sources.disk + recomputed < 0.9 * (len(prompt) - config.cache.page_size):
                raise StorageError(
                    f"a prompt of {len(prompt)} tokens was to lie on disk, but {with_disk.sources} came: see the "
                    "engine's log"
                )
            pairs.append(
                SlowPair(
                    with_disk.ttft_s,
                    without.ttft_s,
                    with_disk.sources.disk,
                    int(recomputed),
                    with_disk.tokens == without.tokens,
                )
            )
            # A cut read and what it leaves must not fall on the next pair.
            on.settle()
    return pairs


def in_turn(index: int, on: EngineTarget, off: EngineTarget, prompt: Sequence[int]) -> tuple[Answer, Answer]:
    """The answers of both; `index` decides which is asked first."""
    order = (on, off) if index % 2 == 0 else (off, on)
    answers = {id(target): target.ask(prompt, 2) for target in order}
    return answers[id(on)], answers[id(off)]


def warm_up(target: EngineTarget, prompt: Sequence[int]) -> None:
    """Lets the model choose its kernels on a text that nobody asks for."""
    target.ask([*reversed(prompt)][: min(256, len(prompt))], 2)
    target.settle()


# --- documents in turn --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CycleRound:
    """All documents once: prompt tokens by source, and the median seconds to the first token."""

    device: int
    host: int
    disk: int
    computed: int
    ttft_s: float

    @property
    def hit_share(self) -> float:
        """The part of the prompt tokens that was not computed."""
        cached = self.device + self.host + self.disk
        return cached / (cached + self.computed)


def cycle(
    config: StrataConfig, served: ServedModel, prompts: Sequence[Sequence[int]], rounds: int, steps: Steps
) -> list[CycleRound]:
    """Asks about every document in turn, so often; least-recently-used eviction loses each before its next turn."""
    results = []
    with targets(served, config) as (target,):
        for number in range(rounds):
            answers = []
            for index, prompt in enumerate(prompts):
                steps.next(f"documents in turn, round {number + 1}: {index + 1}")
                answers.append(target.ask(prompt, 1))
            target.settle()
            sources = [answer.sources for answer in answers]
            found = {
                name: sum(getattr(each, name) for each in sources)
                for name in ("device", "host", "disk", "computed")
            }
            results.append(CycleRound(**found, ttft_s=median([answer.ttft_s for answer in answers])))
    return results


# --- decoding -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DecodeRound:
    """Tokens a second with all tiers and without, and the pages that were backed up and spilled meanwhile."""

    tokens_per_s: float
    off_tokens_per_s: float
    backup_pages: int
    spill_pages: int


MakePrompts = Callable[[int], list[list[int]]]
"""Random prompts by seed: none is ever asked twice."""


def decode(
    config: StrataConfig, served: ServedModel, make: MakePrompts, new_tokens: int, pairs: int, steps: Steps
) -> list[DecodeRound]:
    """Decodes the same prompts on both sides, so often."""
    rounds = []
    with targets(served, config, tiers_off(config)) as (on, off):
        for target in (on, off):
            engine_decode(target.engine, make(0), 4)
            target.settle()
        for index in range(pairs):
            steps.next(f"decode, pair {index + 1}")
            prompts = make(1 + index)
            before = on.engine.stats()
            rates = {}
            for target in (on, off) if index % 2 == 0 else (off, on):
                rates[id(target)] = engine_decode(target.engine, prompts, new_tokens)[0]
                target.settle()
            after = on.engine.stats()
            moved = [int(after[name] - before[name]) for name in ("backup_pages", "spill_pages")]
            if min(moved) == 0:
                raise StorageError(
                    f"{moved[0]} pages were backed up and {moved[1]} spilled while decoding, and the measurement "
                    "is about both: leave --write-policy and --disk-write-policy at through"
                )
            rounds.append(DecodeRound(rates[id(on)], rates[id(off)], *moved))
    return rounds


@dataclass(frozen=True)
class BesideRound:
    """Tokens a second alone and beside copies without pause, by the copies' niceness, and the copies' GB/s."""

    alone: float
    beside: dict[int, float]
    copied_gbps: dict[int, float]


def decode_beside_copies(
    config: StrataConfig,
    served: ServedModel,
    make: MakePrompts,
    new_tokens: int,
    pairs: int,
    niceness: Sequence[int],
    steps: Steps,
) -> list[BesideRound]:
    """Decodes alone, then beside backups on as many threads as the engine would use, for each niceness."""
    threads = max(1, config.cache.copy_threads or 1)
    copiers = {
        nice: CopyYardstick(_COPIED_PIECE, _COPIED_BYTES, threads, backup_niceness=nice) for nice in niceness
    }
    rounds = []
    with targets(served, tiers_off(config)) as (target,):
        engine_decode(target.engine, make(100), 4)
        for index in range(pairs):
            prompts = [make(200 + 10 * index + turn) for turn in range(1 + len(copiers))]
            steps.next(f"beside copies, round {index + 1}")
            alone = engine_decode(target.engine, prompts[0], new_tokens)[0]
            beside, copied = {}, {}
            for turn, (nice, copier) in enumerate(copiers.items(), start=1):
                with copying(copier) as spans:
                    beside[nice] = engine_decode(target.engine, prompts[turn], new_tokens)[0]
                copied[nice] = copier.bytes * len(spans) / sum(spans) / 1e9
            rounds.append(BesideRound(alone, beside, copied))
    return rounds


@contextmanager
def copying(copier: CopyYardstick) -> Iterator[list[float]]:
    """Backs up without pause meanwhile; the seconds that each took are in what it yields, once it is over."""
    stop = threading.Event()
    spans: list[float] = []

    def copy() -> None:
        while not spans or not stop.is_set():
            spans.append(copier.transfer("backup"))

    thread = threading.Thread(target=copy, name="bench-copies")
    thread.start()
    try:
        yield spans
    finally:
        stop.set()
        thread.join()
