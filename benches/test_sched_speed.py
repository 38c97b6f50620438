"""Decisions of the scheduler with many requests waiting, beside those with a tenth as many."""

from __future__ import annotations

from typing import Any

import pytest

from strata.bench.sched import measure


@pytest.mark.parametrize("policy", ["static", "adaptive"])
@pytest.mark.benchmark(group="sched")
def test_decision(benchmark: Any, policy: str) -> None:
    """The whole measurement is timed; what counts is in `extra_info`."""
    many = benchmark.pedantic(measure, (10_000, policy, 500), rounds=1)
    few = measure(1_000, policy, 500)
    keys = ("decision_us_p50", "decision_us_p99", "event_us_amortised")
    benchmark.extra_info |= {key: many[key] for key in keys}
    benchmark.extra_info["decision_over_tenth"] = many["decision_us_p50"] / few["decision_us_p50"]
