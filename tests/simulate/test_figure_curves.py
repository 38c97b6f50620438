"""Curves of throughput against TTFT, by hand."""

from __future__ import annotations

import math

import pytest

from strata.simulate.figures.curves import (
    Curve,
    CurvePoint,
    envelope,
    equal_ttft_ratio,
    peak,
    throughput_at,
)


def curve(*points: tuple[float, float]) -> Curve:
    return [CurvePoint(ttft_s, tokens) for ttft_s, tokens in points]


def test_the_peak_is_the_most_tokens_whatever_the_ttft() -> None:
    assert peak(curve((1.0, 10.0), (2.0, 30.0), (9.0, 25.0))) == 30.0


def test_what_another_point_beats_in_both_is_no_part_of_the_envelope() -> None:
    points = curve((4.0, 20.0), (1.0, 10.0), (2.0, 8.0), (8.0, 15.0), (1.0, 5.0))
    assert envelope(points) == curve((1.0, 10.0), (4.0, 20.0))


def test_between_points_throughput_is_log_linear() -> None:
    rising = envelope(curve((1.0, 10.0), (4.0, 40.0)))
    assert throughput_at(rising, 1.0) == 10.0
    assert throughput_at(rising, 2.0) == pytest.approx(20.0)
    assert throughput_at(rising, math.sqrt(2.0)) == pytest.approx(10.0 * math.sqrt(2.0))
    assert throughput_at(rising, 7.0) == 40.0


def test_equal_curves_have_a_ratio_of_one() -> None:
    points = curve((0.5, 10.0), (1.0, 20.0), (4.0, 30.0))
    assert equal_ttft_ratio(points, points).ratio == pytest.approx(1.0)


def test_the_largest_ratio_is_taken_over_all_ttfts_that_both_reach() -> None:
    base = curve((1.0, 10.0), (2.0, 10.5), (16.0, 40.0))
    other = curve((1.0, 20.0), (2.0, 40.0), (4.0, 42.0))
    found = equal_ttft_ratio(base, other)
    assert found.ttft_s == 2.0
    assert found.ratio == pytest.approx(40.0 / 10.5)


def test_the_largest_ratio_may_be_at_a_point_of_one_curve_alone() -> None:
    base = curve((1.0, 10.0), (9.0, 10.0 * 9.0))
    other = curve((1.0, 10.0), (3.0, 60.0), (9.0, 90.0))
    found = equal_ttft_ratio(base, other)
    assert found.ttft_s == 3.0
    assert found.ratio == pytest.approx(2.0)


def test_a_curve_reaches_the_ttfts_of_points_that_its_envelope_leaves_out() -> None:
    base = curve((1.0, 10.0), (5.0, 9.0))
    other = curve((4.0, 30.0))
    assert equal_ttft_ratio(base, other).ratio == pytest.approx(3.0)


def test_the_ratio_turns_over_with_the_curves_where_they_are_parallel() -> None:
    one = curve((1.0, 10.0), (2.0, 20.0))
    two = curve((1.0, 5.0), (2.0, 10.0))
    assert equal_ttft_ratio(one, two).ratio == pytest.approx(0.5)
    assert equal_ttft_ratio(two, one).ratio == pytest.approx(2.0)


def test_curves_without_a_common_ttft_have_no_ratio_and_a_reason() -> None:
    slow = curve((5.0, 10.0), (9.0, 20.0))
    fast = curve((0.1, 10.0), (1.0, 50.0))
    for found in (equal_ttft_ratio(slow, fast), equal_ttft_ratio(fast, slow)):
        assert found.ratio is None
        assert found.ttft_s is None
        assert "no TTFT that both reach" in found.why
    assert "5 to 9 s against 0.1 to 1 s" in equal_ttft_ratio(slow, fast).why


def test_curves_that_meet_in_one_ttft_are_compared_there() -> None:
    found = equal_ttft_ratio(curve((1.0, 10.0), (2.0, 20.0)), curve((2.0, 50.0), (3.0, 60.0)))
    assert found.ttft_s == 2.0
    assert found.ratio == pytest.approx(2.5)


def test_a_curve_on_which_nothing_came_has_no_ratio() -> None:
    assert equal_ttft_ratio(curve((0.0, 0.0)), curve((1.0, 1.0))).ratio is None
