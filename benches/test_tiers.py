"""A prompt that lies on a slow disk alone, and decoding over all tiers, beside the same with the tiers off.

`python -m strata.bench tiers` is the full measurement.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from strata.bench import tiers
from strata.bench.decode_command import random_prompts
from strata.bench.report import median, progress_steps
from strata.config import StrataConfig
from strata.engine import ServedModel

PAIRS = 2


@pytest.fixture
def config(tmp_path: Path) -> StrataConfig:
    """Settings whose disk root is empty."""
    return tiers.with_tiers(StrataConfig.of(disk_path=tmp_path), "kv")


@pytest.mark.parametrize("bandwidth", [5 * tiers.MB, 50 * tiers.MB])
@pytest.mark.benchmark(group="tiers")
def test_slow_disk(
    benchmark: Any, served: ServedModel, prompts: list[list[int]], config: StrataConfig, bandwidth: int
) -> None:
    """The benchmark's time is that of both sides together; the ratio is in `extra_info`."""
    tiers.fill_disk(config, served, prompts[:PAIRS])
    with progress_steps(PAIRS) as steps:
        measure = partial(tiers.slow_disk, config, served, prompts[:PAIRS], bandwidth, steps)
        pairs = benchmark.pedantic(measure, rounds=1)
    assert all(pair.tokens_equal for pair in pairs)
    benchmark.extra_info["ttft_over_tiers_off"] = median([pair.ratio for pair in pairs])


@pytest.mark.benchmark(group="tiers")
def test_decode(benchmark: Any, served: ServedModel, config: StrataConfig) -> None:
    """Six streams whose pages are backed up and spilled meanwhile."""

    def make(seed: int) -> list[list[int]]:
        return random_prompts(served.model.config.vocab_size, 6, 64, seed)

    with progress_steps(PAIRS) as steps:
        pairs = benchmark.pedantic(partial(tiers.decode, config, served, make, 32, PAIRS, steps), rounds=1)
    rates = [pair.tokens_per_s / pair.off_tokens_per_s for pair in pairs]
    assert min(rates) > 0
    benchmark.extra_info["tokens_per_s_over_tiers_off"] = median(rates)
