"""One request inside the engine: its stream, its text, its tokens, its times."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from strata.engine.api import Chunk, FinishReason, GenerationRequest, TokenSources, Usage
from strata.engine.streams import Stream
from strata.engine.text import StoppingText


@dataclass
class Sequence:
    """State of a request that the engine has not finished."""

    request: GenerationRequest
    stream: Stream
    text: StoppingText
    seed: int
    stop_token_ids: frozenset[int]
    submitted: float = field(default_factory=time.monotonic)
    sources: TokenSources | None = None
    first_token: float | None = None
    generated: int = 0
    preemptions: int = 0

    @property
    def banned(self) -> frozenset[int]:
        """Tokens that may not be chosen now: no end before `min_tokens`."""
        return self.stop_token_ids if self.generated < self.request.sampling.min_tokens else frozenset()

    def take(self, token: int) -> tuple[str, FinishReason | None]:
        """Takes a sampled token in. Returns the text to show and why the answer ends, if it does."""
        self.generated += 1
        if self.first_token is None:
            self.first_token = time.monotonic()
        if token in self.stop_token_ids:
            return self.text.finish(), "stop"
        shown, stopped = self.text.push(token, self.generated >= self.request.sampling.min_tokens)
        if stopped:
            return shown, "stop"
        if self.generated >= self.request.sampling.max_tokens:
            return shown + self.text.finish(), "length"
        return shown, None

    def usage(self, prefill_rate: float | None) -> Usage:
        """What the request cost; `prefill_rate` is in tokens a second, if one was measured yet."""
        prompt = len(self.request.prompt_token_ids)
        sources = self.sources or TokenSources(computed=prompt)
        first = self.first_token if self.first_token is not None else time.monotonic()
        saved = sources.cached / prefill_rate if prefill_rate else 0.0
        return Usage(prompt, self.generated, sources, first - self.submitted, saved, self.preemptions)

    def end(self, text: str, token_ids: tuple[int, ...], reason: FinishReason, usage: Usage) -> None:
        """Sends the last chunk."""
        self.stream.put(Chunk(text, token_ids, reason, usage))
