"""How long a step computed, where the host can tell. A device of its own computes on after the call that started the
step; only a sampled token brings the host up to it. So a step is measured there if it samples, the host had caught up
before it began, and no load on its way may have held it up unseen.
"""

from __future__ import annotations

from collections.abc import Sequence


class StepClock:
    """Tells measured steps from others, in the order in which they run."""

    def __init__(self, runs_behind: bool) -> None:
        self._runs_behind = runs_behind
        self._caught_up = True

    def busy_s(self, took_s: float, samples: Sequence[bool], was_loading: bool) -> float:
        """The seconds of computing in a step that took so many without its waits; 0 if that is not known."""
        if not self._runs_behind:
            return took_s
        samples_any = any(samples)
        measured = samples_any and self._caught_up and not was_loading
        self._caught_up = samples_any
        return took_s if measured else 0.0

    def failed(self) -> None:
        """A step was given up: what was queued of it is still on the device."""
        self._caught_up = False
