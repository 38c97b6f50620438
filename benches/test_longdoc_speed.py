"""Time to first token of 1,000-token prompts: cold, and from each tier, beside what each is judged by.

`python -m strata.bench longdoc` is the full measurement, with 4,000 tokens and a disk that is dropped from the page
cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from strata.bench.bandwidth import CopyBaseline
from strata.bench.reference import BarePool, Reference
from strata.bench.report import median
from strata.bench.target import EngineTarget
from strata.engine import ServedModel

ROUNDS = 5
CACHED = 62 * 16
"""Whole pages of 16 in 999 tokens: at least one token is always computed."""


def measure(
    benchmark: Any, target: EngineTarget, prompt: list[int], before: Callable[[], object], source: str
) -> float:
    """Benchmarks asking for one token; `before` runs before each round. Returns the median TTFT in seconds."""
    times: list[float] = []

    def ask() -> None:
        answer = target.ask(prompt, 1)
        assert getattr(answer.sources, source) == (len(prompt) if source == "computed" else CACHED)
        times.append(answer.ttft_s)

    def setup() -> None:
        target.settle()
        before()

    benchmark.pedantic(ask, setup=setup, rounds=ROUNDS, warmup_rounds=1)
    return median(times[1:])


@pytest.mark.benchmark(group="longdoc")
def test_cold(benchmark: Any, target: EngineTarget, reference: Reference, prompts: list[list[int]]) -> None:
    """Nothing cached, beside a prefill by the reference."""
    yardstick: list[float] = []

    def before() -> None:
        target.flush()
        yardstick.append(reference.prefill(prompts[0])[0])

    cold = measure(benchmark, target, prompts[0], before, "computed")
    benchmark.extra_info |= {
        "reference": reference.label,
        "cold_over_reference": cold / median(yardstick[1:]),
    }


@pytest.mark.benchmark(group="longdoc")
def test_device_hit(
    benchmark: Any, target: EngineTarget, served: ServedModel, prompts: list[list[int]]
) -> None:
    """All pages on the device, beside a bare forward of the rest over the same context."""
    target.ask(prompts[1], 1)
    bare = BarePool(served.model, len(prompts[1]), 1)
    yardstick: list[float] = []
    rest = len(prompts[1]) - CACHED
    hit = measure(
        benchmark,
        target,
        prompts[1],
        lambda: yardstick.append(bare.seconds(prompts[1], rest)),
        "device",
    )
    benchmark.extra_info["hit_over_bare_forward"] = hit / median(yardstick[1:])


@pytest.mark.benchmark(group="longdoc")
def test_host_hit(benchmark: Any, target: EngineTarget, prompts: list[list[int]]) -> None:
    """All pages on the host, beside device hits and copies of the same bytes."""
    target.ask(prompts[2], 1)
    target.settle()
    kv_bytes = CACHED // 16 * int(target.engine.stats()["page_bytes"])
    copies = CopyBaseline(kv_bytes, 2)
    device: list[float] = []
    rates: list[float] = []

    def before() -> None:
        device.append(target.ask(prompts[2], 1).ttft_s)
        target.settle()
        rates.append(max(copies.streaming(), copies.threaded()))
        target.demote(["device"])

    hit = measure(benchmark, target, prompts[2], before, "host")
    copy_s = kv_bytes / median(rates) / 1e9
    benchmark.extra_info |= {
        "extra_over_copy": (hit - median(device)) / copy_s,
        "hit_over_device_hit": hit / median(device),
    }


@pytest.mark.benchmark(group="longdoc")
def test_disk_hit(benchmark: Any, target: EngineTarget, prompts: list[list[int]]) -> None:
    """All pages on disk after a restart, beside the same read alone."""
    target.ask(prompts[3], 1)
    target.settle()
    reads: list[float] = []

    def before() -> None:
        target.restart()
        reads.append(target.read_from_disk(prompts[3], CACHED // 16)[1])
        target.restart()

    hit = measure(benchmark, target, prompts[3], before, "disk")
    benchmark.extra_info |= {"read_s": median(reads), "hit_over_read": hit / median(reads)}
