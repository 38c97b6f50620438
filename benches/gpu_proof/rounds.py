"""Measurements side by side: every way once a round, in an order that turns; what slows the machine slows all."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Sample:
    """One run of one way."""

    seconds: float
    bytes: int

    @property
    def rate(self) -> float:
        """Bytes a second."""
        return self.bytes / self.seconds


def interleave(
    ways: Mapping[str, Callable[[], Sample]], rounds: int, warm_ups: int = 1
) -> dict[str, list[Sample]]:
    """``rounds`` samples of each way, after ``warm_ups`` that do not count."""
    names = list(ways)
    found: dict[str, list[Sample]] = {name: [] for name in names}
    for turn in range(-warm_ups, rounds):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            sample = ways[name]()
            if turn >= 0:
                found[name].append(sample)
    return found


def median_rate(samples: list[Sample]) -> float:
    """Bytes a second."""
    return statistics.median(sample.rate for sample in samples)


def rate_ratio(samples: list[Sample], yardstick: list[Sample]) -> float:
    """How fast one way is, as a share of another: the median of the rounds' own ratios."""
    return statistics.median(one.rate / other.rate for one, other in zip(samples, yardstick, strict=True))


def time_ratio(samples: list[Sample], yardstick: list[Sample]) -> float:
    """How long one way takes, as a multiple of another: the median of the rounds' own ratios."""
    return statistics.median(
        one.seconds / other.seconds for one, other in zip(samples, yardstick, strict=True)
    )
