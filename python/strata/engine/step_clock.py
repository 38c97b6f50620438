"""How long a step computed, where the host can tell. A device of its own computes on after the call that started the
step, and two things bring the host up to it: a sampled token, and the wait that keeps it no more than a step ahead.

A step that samples is measured if the host had caught up before it began. One that does not is measured when the host,
with the next step queued already, sees it end: from the end of the step before it, seen in the same way, or from its
own beginning if the host had caught up. No step is measured that a load on its way may have held up unseen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class MeasuredStep:
    """One step of one request: `tokens` after `context` others took `seconds`."""

    tokens: int
    context: int
    seconds: float


class StepClock:
    """Tells measured steps from others, in the order in which they run."""

    def __init__(self, runs_behind: bool) -> None:
        self._runs_behind = runs_behind
        self._caught_up = True
        self._row: tuple[int, int] | None = None
        self._row_began: float | None = None

    def busy_s(self, took_s: float, samples: Sequence[bool], was_loading: bool) -> float:
        """The seconds of computing in a step that took so many without its waits; 0 if that is not known by now."""
        if not self._runs_behind:
            return took_s
        samples_any = any(samples)
        measured = samples_any and self._caught_up and not was_loading
        self._caught_up = samples_any
        if samples_any:
            self._forget()
        return took_s if measured else 0.0

    def queued(
        self, row: tuple[int, int] | None, began: float, was_loading: bool, waited: bool, now: float
    ) -> MeasuredStep | None:
        """The step before, if it is measured by now. Comes before `busy_s` of a step that samples nothing; `row` has
        its tokens and the context before them if it is one request's, `waited` says whether the step before was seen
        to end `now`."""
        before, row_began = self._row, self._row_began
        self._row = None if was_loading else row
        if waited:
            self._row_began = now
        else:
            self._row_began = began if self._caught_up else None
        if before is None or row_began is None or not waited:
            return None
        return MeasuredStep(*before, now - row_began)

    def failed(self) -> None:
        """A step was given up: what was queued of it is still on the device."""
        self._caught_up = False
        self._forget()

    def _forget(self) -> None:
        self._row = self._row_began = None
