"""The gap between two curves and an oracle's, against numbers by hand."""

from __future__ import annotations

import math

import pytest

from strata.simulate.figures.curves import CurvePoint
from strata.simulate.figures.gap import gap


def curve(*points: tuple[float, float]) -> list[CurvePoint]:
    """Points of mean TTFT and throughput."""
    return [CurvePoint(ttft_s, tokens) for ttft_s, tokens in points]


BASE = curve((1.0, 10.0), (4.0, 100.0))
ORACLE = curve((1.0, 40.0), (3.0, 200.0))


def test_the_share_closed_is_taken_at_the_ttft_of_the_bases_peak() -> None:
    found = gap(BASE, curve((1.0, 10.0), (4.0, 150.0)), ORACLE)
    assert found.at_peak.ttft_s == 4.0
    assert found.at_peak.other == pytest.approx(1.5)
    assert found.at_peak.oracle == pytest.approx(2.0)
    assert found.at_peak.closed == pytest.approx(0.5)
    assert (found.peak_other, found.peak_oracle) == (1.5, 2.0)


def test_a_peak_that_needs_a_larger_ttft_does_not_count_in_full() -> None:
    found = gap(BASE, curve((1.0, 10.0), (16.0, 160.0)), ORACLE)
    assert found.at_peak.other == pytest.approx(0.4)  # the middle of 10 and 160, both axes logarithmic
    assert found.peak_other == pytest.approx(1.6)


def test_every_ttft_from_where_all_curves_have_begun_is_compared() -> None:
    found = gap(BASE, curve((2.0, 20.0), (4.0, 150.0)), ORACLE)
    assert [level.ttft_s for level in found.levels] == [2.0, 3.0, 4.0]
    base_there = math.sqrt(10.0 * 100.0)
    assert found.levels[0].other == pytest.approx(20.0 / base_there)
    assert found.least_other == found.levels[0].other
    assert len(found.shares) == 3
    assert found.shares[0] < 0.0


def test_where_the_oracle_is_hardly_ahead_there_is_no_gap() -> None:
    found = gap(BASE, BASE, curve((1.0, 10.2), (4.0, 102.0)))
    assert found.at_peak.closed is None
    assert found.shares == []
    assert found.least_other == pytest.approx(1.0)


def test_a_curve_that_begins_after_the_bases_peak_is_compared_there_at_its_best() -> None:
    found = gap(BASE, curve((5.0, 50.0)), ORACLE)
    assert [level.ttft_s for level in found.levels] == [4.0]
    assert found.at_peak.other == pytest.approx(0.5)
