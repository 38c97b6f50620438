"""How often something had which size, counted in classes, as `/metrics` shows it.

The engine's thread adds; any thread may read, and sees everything but perhaps what is being added.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

GAPS_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
"""Upper ends of the classes of gaps between two tokens of one stream, those of vLLM's histogram."""
STEP_TOKENS = (1, 8, *(2**power for power in range(4, 15)))
"""The same of a step's tokens."""


class Histogram:
    """One quantity under the name that the engine's numbers have for it. `ends` are the upper ends of the classes; what
    is larger has a class of its own."""

    def __init__(self, name: str, sum_name: str, ends: Iterable[float]) -> None:
        self._name, self._sum_name = name, sum_name
        self._ends = tuple(ends)
        self._counts = [0] * (len(self._ends) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        """Counts one."""
        self._counts[bisect_left(self._ends, value)] += 1
        self._sum += value

    def stats(self) -> dict[str, float]:
        """By flat name: `token_gap_le_0.01` and so on, each with those below it, `token_gap_count`,
        `token_gap_sum_s`."""
        flat: dict[str, float] = {}
        number = 0
        counts = tuple(self._counts)
        for end, count in zip(self._ends, counts, strict=False):
            number += count
            flat[f"{self._name}_le_{end:g}"] = float(number)
        flat[f"{self._name}_count"] = float(number + counts[-1])
        flat[f"{self._name}_{self._sum_name}"] = self._sum
        return flat
