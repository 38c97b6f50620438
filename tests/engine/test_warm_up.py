"""What an engine knows before its first request, and that finding it out leaves no trace."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from engine_harness import MakeEngine, Sizes, ask, assert_exact, tiny_served, wait_idle

from strata._core import LayerHold
from strata.engine import ServedModel
from strata.engine.warm_up import first_steps, warm_up
from strata.models import CausalLM, pool_shape, tiny_random_model
from strata.models.attention import AttentionPlan, PlainAttention
from strata.models.paged_attention import AttentionBatch

SHAPES = [(127, 0), (16, 0), (1, 127)]
"""Steps that are measured, as (tokens, context)."""


class FakeRuntime:
    """Notes what it is told."""

    def __init__(self, link: tuple[float, float] | None, problem: str | None) -> None:
        self.measured_link = (link, problem)
        self.told: list[tuple[int, int, float]] = []

    def measured(self, tokens: int, context: int, busy_s: float) -> None:
        """As `Runtime.measured`."""
        self.told.append((tokens, context, busy_s))


def pool_of(model: CausalLM, pages: int, page_size: int = 4) -> torch.Tensor:
    """What an engine would serve from."""
    return torch.zeros(pool_shape(model.config, pages, page_size), dtype=model.dtype)


class NotingAttention(PlainAttention):
    """Notes what pools it is asked about: page size, slots, and the lowest page that a row has."""

    def __init__(self) -> None:
        self.asked: set[tuple[int, int, int]] = set()

    def plan(self, batch: AttentionBatch) -> AttentionPlan:
        """As `PagedAttention` says."""
        lowest = min(int(table.min()) for table in batch.page_tables)
        self.asked.add((batch.page_size, batch.slots, lowest))
        return super().plan(batch)


@pytest.mark.parametrize(
    ("page_size", "pages", "slots", "lowest"),
    [(1, 500, 500, 372), (4, 40, 160, 8), (24, 10, 240, 4), (256, 2, 512, 1), (4, 31, 128, 0)],
)
def test_what_depends_on_pages_is_met_before_the_first_request(
    make_engine: MakeEngine, page_size: int, pages: int, slots: int, lowest: int
) -> None:
    """The first steps go over the last pages of the engine's pool, in its page size; only a pool that has no room for
    them is passed by, and then its page size is kept."""
    model = tiny_random_model(2)
    model.attention = noting = NotingAttention()
    make_engine(sizes=Sizes(page_size, pages, 1, 0), served=tiny_served(2, model=model))
    assert noting.asked == {(page_size, slots, lowest)}


def test_the_first_steps_tell_a_step_a_token_and_a_decode_apart(served: ServedModel) -> None:
    steps = first_steps(served.model, pool_of(served.model, 64), 4)
    assert sorted((step.tokens, step.context) for step in steps) == sorted(SHAPES)
    assert all(step.seconds > 0 for step in steps)


@pytest.mark.parametrize(
    ("link", "problem"), [((50e-6, 1 / 4e9), None), (None, "no byte came through within 150ms"), (None, None)]
)
def test_what_was_measured_is_told_and_logged_once(
    served: ServedModel,
    caplog: pytest.LogCaptureFixture,
    link: tuple[float, float] | None,
    problem: str | None,
) -> None:
    runtime = FakeRuntime(link, problem)
    with caplog.at_level(logging.INFO, "strata.engine"):
        warm_up(served.model, runtime, pool_of(served.model, 64), 4)
    assert sorted(told[:2] for told in runtime.told) == sorted(SHAPES)
    said = {record.levelno: record.getMessage() for record in caplog.records}
    assert said[logging.INFO].startswith("measured before serving: prefill of 16 tokens ")
    assert ("4,000 MB/s + 50 us a transfer" in said[logging.INFO]) == (link is not None)
    if problem is None:
        assert list(said) == [logging.INFO]
    else:
        assert problem in said[logging.WARNING] and "learnt from its first loads" in said[logging.WARNING]


@pytest.mark.parametrize("copy_bandwidth", [0, 3_000_000])
@pytest.mark.parametrize("sizes", [Sizes(), Sizes(4, 2, 1, 0), Sizes(4, 7, 300, 0)])
def test_the_link_is_known_before_the_first_request_and_nothing_else_has_happened(
    make_engine: MakeEngine,
    served: ServedModel,
    caplog: pytest.LogCaptureFixture,
    sizes: Sizes,
    copy_bandwidth: int,
) -> None:
    engine = make_engine(sizes=sizes, copy_bandwidth=copy_bandwidth)
    stats = engine.stats()
    # A machine that does not run a copy thread for 150 ms is told so.
    assert stats.get("cost_load_bytes_per_s", 0) > 0 or "could not be measured" in caplog.text
    assert (stats["cost_prefill_measurements"], stats["cost_decode_measurements"]) == (2, 1)
    touched = [
        name
        for name, value in stats.items()
        if value
        and not name.startswith(("cost_", "disk_"))
        and not name.endswith(("_capacity_pages", "prefill_tokens_per_s", "page_bytes"))
    ]
    assert touched == [], "the measurement left a trace"
    wait_idle(engine)
    prompt = [5, 6, 7]
    assert_exact(served.model, prompt, ask(engine, prompt, max_tokens=2))
    assert "cost_load_error_median" not in stats, "nothing was loaded that could have been predicted"
    stats = engine.stats()
    for work in ("prefill", "decode"):
        assert 0 <= stats[f"cost_{work}_error_median"] <= stats[f"cost_{work}_error_p90"]
        assert stats[f"cost_{work}_measurements"] >= 2


def test_without_a_link_nothing_is_measured(make_engine: MakeEngine, tmp_path: Path) -> None:
    no_host = make_engine(tmp_path / "0", sizes=Sizes(host=0))
    assert "cost_load_bytes_per_s" not in no_host.stats()
    hold = LayerHold("load", 0, 60.0)
    held = make_engine(tmp_path / "1", hold=hold)
    assert "cost_load_bytes_per_s" not in held.stats() and not hold.wait_until_held(0.0)
