"""Counters over time: what came in which seconds, without a sample being taken while nothing happens."""

from __future__ import annotations

import pytest

from strata.serve.history import POINT_S, POINTS, SPAN_S, History


def test_growth_lands_in_the_seconds_in_which_it_happened() -> None:
    history = History(("tokens",))
    for now, tokens in ((1000.0, 5.0), (1002.0, 25.0), (1004.0, 105.0), (1011.0, 105.0)):
        history.add({"tokens": tokens}, now)
    points = history.points("tokens", 1011.0)
    assert len(points) == POINTS and sum(points) == pytest.approx(100.0)
    assert points[-3:] == pytest.approx([100.0, 0.0, 0.0])
    assert history.growth("tokens", 8.0, 1011.0) == pytest.approx((40.0, 8.0))
    assert history.growth("tokens", 60.0, 1011.0) == pytest.approx((100.0, 11.0)), (
        "only since the first sample"
    )


def test_what_follows_a_quiet_spell_is_not_spread_over_it() -> None:
    history = History(("tokens",))
    history.add({"tokens": 10.0}, 1000.0)
    history.resume(1100.0)
    history.add({"tokens": 60.0}, 1101.0)
    points = history.points("tokens", 1101.0)
    assert points[-1] == pytest.approx(50.0) and sum(points[:-1]) == 0.0


def test_old_samples_leave_and_frequent_looks_push_none_out() -> None:
    history = History(("tokens",))
    for tenth in range(10_000):
        history.add({"tokens": tenth / 10}, 1000.0 + tenth / 10)
    assert history.growth("tokens", SPAN_S, 2000.0)[0] == pytest.approx(SPAN_S, abs=0.2)
    points = history.points("tokens", 2000.0)
    assert points == pytest.approx([POINT_S] * POINTS, abs=0.2)
    assert len(history._samples) == history._samples.maxlen


def test_before_the_first_sample_there_is_nothing() -> None:
    history = History(("tokens",))
    assert history.points("tokens", 5.0) == [0.0] * POINTS
    assert history.growth("tokens", 10.0, 5.0) == (0.0, 0.0)
