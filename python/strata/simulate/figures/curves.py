"""Throughput against TTFT, and what two such curves say about each other. Pure arithmetic: no simulation here.

Two systems are compared at equal mean TTFT: the ratio of their throughputs at each TTFT that both reach, and of these
ratios the largest. A curve reaches the TTFTs between its least and its most. At one of them its throughput is the best
that it has at no larger TTFT; between two points it is interpolated log-linearly in both.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class CurvePoint:
    """One rate: mean TTFT in seconds, generated tokens per second."""

    ttft_s: float
    output_tokens_per_s: float


Curve = Sequence[CurvePoint]


@dataclass(frozen=True)
class EqualTtft:
    """The largest ratio and the TTFT where it is; or none of both, and why."""

    ratio: float | None
    ttft_s: float | None
    why: str = ""


def peak(curve: Curve) -> float:
    """The most output tokens per second that a curve of at least one point reaches."""
    return max(point.output_tokens_per_s for point in curve)


def envelope(curve: Curve) -> list[CurvePoint]:
    """The points that no other beats in both, by TTFT: along them the throughput rises."""
    rising: list[CurvePoint] = []
    for point in sorted(curve, key=lambda point: (point.ttft_s, -point.output_tokens_per_s)):
        if not rising or point.output_tokens_per_s > rising[-1].output_tokens_per_s:
            rising.append(point)
    return rising


def throughput_at(rising: Sequence[CurvePoint], ttft_s: float) -> float:
    """The throughput at a TTFT of an envelope, which must begin at no larger one."""
    after = bisect_right([point.ttft_s for point in rising], ttft_s)
    below = rising[after - 1]
    if after == len(rising) or ttft_s == below.ttft_s:
        return below.output_tokens_per_s
    above = rising[after]
    part = math.log(ttft_s / below.ttft_s) / math.log(above.ttft_s / below.ttft_s)
    return below.output_tokens_per_s * math.pow(above.output_tokens_per_s / below.output_tokens_per_s, part)


def equal_ttft_ratio(base: Curve, other: Curve) -> EqualTtft:
    """The largest `other` over `base` in throughput over all TTFTs that both reach.

    Between two neighbouring points of either curve the ratio is monotone, so the largest one is at a point.
    """
    usable = [
        [point for point in curve if min(point.ttft_s, point.output_tokens_per_s) > 0]
        for curve in (base, other)
    ]
    if not all(usable):
        return EqualTtft(None, None, "a curve has no point with a TTFT and a throughput above 0")
    reaches = [(min(p.ttft_s for p in curve), max(p.ttft_s for p in curve)) for curve in usable]
    least, most = max(first for first, _ in reaches), min(last for _, last in reaches)
    if least > most:
        (base_from, base_to), (other_from, other_to) = reaches
        return EqualTtft(
            None,
            None,
            f"no TTFT that both reach: {base_from:.3g} to {base_to:.3g} s against {other_from:.3g} to {other_to:.3g} s",
        )
    rising = [envelope(curve) for curve in usable]
    levels = {least, most, *(p.ttft_s for curve in rising for p in curve if least <= p.ttft_s <= most)}
    ratios = [
        (throughput_at(rising[1], level) / throughput_at(rising[0], level), level) for level in sorted(levels)
    ]
    ratio, ttft_s = max(ratios, key=lambda pair: pair[0])
    return EqualTtft(ratio, ttft_s)
