"""Copies of a prompt's worth of bytes in memory: the stores that the engine uses beside the C library's memcpy."""

from __future__ import annotations

from typing import Any

import pytest

from strata.bench.bandwidth import CopyBaseline
from strata.bench.report import median

BYTES = 64 << 20


@pytest.mark.benchmark(group="copy")
def test_streaming_copy(benchmark: Any) -> None:
    """One thread with non-temporal stores; the ratios compare it with memcpy by one thread and by two."""
    one, two = CopyBaseline(BYTES, 1), CopyBaseline(BYTES, 2)
    rates: dict[str, list[float]] = {"streaming": [], "memcpy_1": [], "memcpy_2": []}

    def yardsticks() -> None:
        rates["memcpy_1"].append(one.threaded())
        rates["memcpy_2"].append(two.threaded())

    benchmark.pedantic(
        lambda: rates["streaming"].append(one.streaming()), setup=yardsticks, rounds=15, warmup_rounds=2
    )
    middle = {name: median(found) for name, found in rates.items()}
    benchmark.extra_info |= {f"{name}_gbps": rate for name, rate in middle.items()}
    benchmark.extra_info["streaming_over_memcpy_1"] = middle["streaming"] / middle["memcpy_1"]
    benchmark.extra_info["streaming_over_memcpy_2"] = middle["streaming"] / middle["memcpy_2"]
    assert all(rate > 0 for rate in middle.values())
