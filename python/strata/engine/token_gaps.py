"""How long streams waited for their next token: one histogram over all of them, counted as tokens come out.

The engine's thread adds; any thread may read, and sees every gap but perhaps the one that is being added.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

ENDS_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
"""Upper ends of the classes in seconds, those of vLLM's histogram; what is longer has a class of its own."""


class TokenGaps:
    """Gaps between two tokens of one stream, in seconds."""

    def __init__(self, ends: Iterable[float] = ENDS_S) -> None:
        self._ends = tuple(ends)
        self._counts = [0] * (len(self._ends) + 1)
        self._sum_s = 0.0

    def add(self, gap_s: float) -> None:
        """Counts one gap."""
        self._counts[bisect_left(self._ends, gap_s)] += 1
        self._sum_s += gap_s

    def stats(self) -> dict[str, float]:
        """By flat name: `token_gap_le_0.01` and so on, each with those below it, `token_gap_count`,
        `token_gap_sum_s`."""
        flat: dict[str, float] = {}
        gaps = 0
        counts = tuple(self._counts)
        for end, count in zip(self._ends, counts, strict=False):
            gaps += count
            flat[f"token_gap_le_{end:g}"] = float(gaps)
        flat["token_gap_count"] = float(gaps + counts[-1])
        flat["token_gap_sum_s"] = self._sum_s
        return flat
