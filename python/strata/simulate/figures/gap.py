"""How much of the way from one system to an oracle another has gone. Pure arithmetic: no simulation here.

At a mean TTFT, each curve's throughput is the best that it has at no larger one; between two of its points it is
interpolated log-linearly, beyond its last it stays. TTFTs are compared from the largest of the three least ones, where
every curve has begun, to that of the base's peak. The share closed at one of them is (other - base) / (oracle - base),
in throughput; where the oracle is less than `LEAST_GAP` ahead there is no gap.
"""

from __future__ import annotations

from dataclasses import dataclass

from strata.simulate.figures.curves import Curve, envelope, peak, throughput_at

LEAST_GAP = 1.03


@dataclass(frozen=True)
class Level:
    """One mean TTFT in seconds; throughputs there, over the base's."""

    ttft_s: float
    other: float
    oracle: float

    @property
    def closed(self) -> float | None:
        """The share of the gap that is closed; None where there is no gap."""
        return (self.other - 1.0) / (self.oracle - 1.0) if self.oracle >= LEAST_GAP else None


@dataclass(frozen=True)
class Gap:
    """All compared TTFTs in rising order; the last is that of the base's peak. And the plain peaks over the base's."""

    levels: list[Level]
    peak_other: float
    peak_oracle: float

    @property
    def at_peak(self) -> Level:
        """At the mean TTFT of the base's peak."""
        return self.levels[-1]

    @property
    def least_other(self) -> float:
        """The other's least throughput over the base's."""
        return min(level.other for level in self.levels)

    @property
    def shares(self) -> list[float]:
        """The shares closed, at all levels that have a gap."""
        return [share for share in (level.closed for level in self.levels) if share is not None]


def gap(base: Curve, other: Curve, oracle: Curve) -> Gap:
    """The three curves compared. Each has at least one point with a TTFT and a throughput above 0."""
    rising = [
        envelope([point for point in curve if min(point.ttft_s, point.output_tokens_per_s) > 0])
        for curve in (base, other, oracle)
    ]
    most = rising[0][-1].ttft_s
    least = max(curve[0].ttft_s for curve in rising)
    at = sorted({most, *(p.ttft_s for curve in rising for p in curve if least <= p.ttft_s <= most)})
    levels = []
    for ttft_s in at:
        base_there, other_there, oracle_there = (
            throughput_at(curve, max(ttft_s, curve[0].ttft_s)) for curve in rising
        )
        levels.append(Level(ttft_s, other_there / base_there, oracle_there / base_there))
    return Gap(levels, peak(other) / peak(base), peak(oracle) / peak(base))
