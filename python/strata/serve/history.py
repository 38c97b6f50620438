"""The last five minutes in numbers: samples of the engine's counters, and what they come to in each few seconds.

Samples are taken while a request is being answered and while somebody looks, so an idle server does nothing.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Mapping

import numpy as np

SPAN_S = 300.0
POINT_S = 5.0
SAMPLE_S = 2.0
POINTS = int(SPAN_S / POINT_S)


class History:
    """Samples of counters that only grow, by name. Those of `names` are kept; what a sample lacks is 0."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._columns = {name: column for column, name in enumerate(names)}
        self._samples: deque[tuple[float, tuple[float, ...]]] = deque(maxlen=2 * int(SPAN_S / SAMPLE_S))
        self._lock = threading.Lock()

    def add(self, counters: Mapping[str, float], now: float | None = None) -> None:
        """One sample, in place of the latest where that followed its own predecessor closely: the latest is always of
        now, however often it is looked at. `now` is `time.monotonic`'s."""
        now = time.monotonic() if now is None else now
        values = tuple(counters.get(name, 0.0) for name in self._columns)
        with self._lock:
            if len(self._samples) >= 2 and now - self._samples[-2][0] < SAMPLE_S:
                self._samples.pop()
            self._samples.append((now, values))

    def resume(self, now: float | None = None) -> None:
        """Work begins after a spell without any: what the counters were still holds, so that what comes now is not
        spread over the spell."""
        now = time.monotonic() if now is None else now
        with self._lock:
            if self._samples and now - self._samples[-1][0] > SAMPLE_S:
                self._samples.append((now, self._samples[-1][1]))

    def growth(self, name: str, seconds: float, now: float | None = None) -> tuple[float, float]:
        """By how much a counter grew in the last `seconds`, and in how many of these it was looked at."""
        now = time.monotonic() if now is None else now
        samples = self._samples.copy()
        if not samples:
            return 0.0, 0.0
        start = max(now - seconds, samples[0][0])
        at, values = self._curve(name, samples)
        first, last = np.interp((start, now), at, values)
        return float(last - first), now - start

    def points(self, name: str, now: float | None = None) -> list[float]:
        """By how much a counter grew in each `POINT_S` of the last `SPAN_S`, the present one last. Borders of points
        stay where they are while time goes on."""
        now = time.monotonic() if now is None else now
        samples = self._samples.copy()
        if not samples:
            return [0.0] * POINTS
        end = math.ceil(now / POINT_S) * POINT_S
        borders = end - POINT_S * np.arange(POINTS, -1, -1)
        at, values = self._curve(name, samples)
        growth: list[float] = np.diff(np.interp(borders, at, values)).tolist()
        return growth

    def _curve(
        self, name: str, samples: deque[tuple[float, tuple[float, ...]]]
    ) -> tuple[list[float], list[float]]:
        column = self._columns[name]
        return [at for at, _ in samples], [values[column] for _, values in samples]
