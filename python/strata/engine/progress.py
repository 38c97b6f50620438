"""How far one prompt is: noted by the engine's thread with each plan, read by any thread without waiting."""

from __future__ import annotations

from strata.engine.api import Progress, TokenSources

_WEIGHT = 0.3
"""Weight of the newest step in the estimate of seconds a token."""


class PrefillProgress:
    """The progress of one request's prompt of `prompt_tokens` tokens."""

    def __init__(self, prompt_tokens: int) -> None:
        self._prompt_tokens = prompt_tokens
        self._done = 0
        self._noted = 0.0
        self._seconds_per_token: float | None = None
        self._sources: TokenSources | None = None

    def begin(
        self, done: int, sources: TokenSources, now: float, seconds_per_token: float | None = None
    ) -> None:
        """The request was admitted at `now` with `done` tokens in place; it begins anew after a preemption. The
        engine's usual pace serves as the estimate until its own is known."""
        self._done, self._noted, self._sources = done, now, sources
        self._seconds_per_token = seconds_per_token

    def note(self, done: int, now: float) -> None:
        """A step ended at `now`; `done` tokens are in place, generated ones too."""
        tokens = min(done, self._prompt_tokens) - self._done
        if tokens > 0:
            # From step to step, so that the turns of others and a context that grows count.
            pace, old = (now - self._noted) / tokens, self._seconds_per_token
            self._seconds_per_token = pace if old is None else old + _WEIGHT * (pace - old)
        self._done, self._noted = done, now

    def report(self) -> Progress:
        """Where the prompt stands."""
        done, pace = min(self._done, self._prompt_tokens), self._seconds_per_token
        left = self._prompt_tokens - done
        remaining = 0.0 if not left else None if pace is None else left * pace
        return Progress(self._prompt_tokens, done, remaining, self._sources)
