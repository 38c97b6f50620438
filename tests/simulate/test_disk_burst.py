"""Of a burst of questions about contexts on disk, adaptive prefetching reads what is cheaper to read than compute."""

from __future__ import annotations

import pytest

from strata.simulate import configure, simulate, table
from strata.simulate.figures import figure_13
from strata.simulate.figures.study import Study


@pytest.mark.parametrize("policy", ["adaptive", "best_effort"])
def test_of_a_burst_nobody_gives_up_a_read_for_those_before_it(policy: str) -> None:
    """Figure 13's machine reads a context in a tenth of the time in which it computes one. Neither how long the disk's
    queue is, nor how far a read has come beside others, is a reason to compute: the device's queue is longer."""
    _, page_first = figure_13.cases(Study(table()))
    burst = page_first.but(
        {"workload": {"rate": None, "queries": 150}, "system": {"prefetch_policy": policy}}
    )
    config = configure(burst.hardware, burst.model, "ours", burst.workload, burst.overrides)
    prompt = simulate(config)["prompt_tokens"]
    # The questions are 0.5 %; what the first requests begin with before anything is known of the disk is the rest.
    assert prompt["computed"] < 0.04 * sum(prompt.values())
    assert prompt["disk"] > 0.6 * sum(prompt.values())
