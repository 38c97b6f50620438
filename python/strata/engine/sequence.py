"""One request inside the engine: its stream, its text, its tokens, its times."""

from __future__ import annotations

import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from strata.engine.api import Chunk, FinishReason, GenerationRequest, TokenLogprob, TokenSources, Usage
from strata.engine.grammar import GrammarState
from strata.engine.logit_rules import Row
from strata.engine.sampler import Sampled
from strata.engine.streams import Stream
from strata.engine.text import StoppingText


@dataclass
class Sequence:
    """State of a request that the engine has not finished. A preemption leaves it as it is: the request's pages go,
    its tokens stay."""

    request: GenerationRequest
    stream: Stream
    text: StoppingText
    seed: int
    stop_token_ids: frozenset[int]
    grammar: GrammarState | None = None
    submitted: float = field(default_factory=time.monotonic)
    sources: TokenSources | None = None
    admitted: float | None = None
    """When the first step that computed for it began."""
    first_token: float | None = None
    last_token: float | None = None
    output: list[int] = field(default_factory=list)
    prompt_logprobs: dict[int, TokenLogprob] = field(default_factory=dict)
    """By the position of the token that is predicted."""
    preemptions: int = 0

    @property
    def generated(self) -> int:
        """Tokens of the answer so far."""
        return len(self.output)

    @cached_property
    def _distinct_prompt(self) -> npt.NDArray[np.int64]:
        return np.unique(np.asarray(self.request.prompt_token_ids, np.int64))

    @cached_property
    def _ends(self) -> npt.NDArray[np.int64]:
        return np.array(sorted(self.stop_token_ids), np.int64)

    def row(self) -> Row:
        """What the next token depends on. No end before `min_tokens`."""
        params = self.request.sampling
        banned = self._ends if self.generated < params.min_tokens else ()
        prompt = self._distinct_prompt if params.repetition_penalty != 1.0 else ()
        allowed = self.grammar.allowed() if self.grammar else None
        return Row(params, self.seed, self.output, prompt, banned, allowed)

    def add_prompt_logprobs(self, position: int, found: SequenceOf[TokenLogprob]) -> None:
        """Takes in those of the prompt tokens from `position` on; once more after a preemption."""
        self.prompt_logprobs.update(enumerate(found, position))

    def take(self, sampled: Sampled, prefill_rate: float | None) -> Chunk:
        """Takes a sampled token in. Returns the chunk to send: the text to show, and why the answer ends, if it does.
        `prefill_rate` as in `usage`. Raises RequestError where the answer's grammar cannot go on."""
        first = not self.output
        self.output.append(sampled.token_id)
        self.last_token = time.monotonic()
        if self.first_token is None:
            self.first_token = self.last_token
        if self.grammar is not None:
            self.grammar.take(sampled.token_id)
        text, reason = self._text(sampled.token_id)
        return Chunk(
            text,
            (sampled.token_id,),
            reason,
            self.usage(prefill_rate) if reason else None,
            (sampled.logprob,) if sampled.logprob else (),
            self._whole_prompt_logprobs() if first else (),
            self._stopped_by(sampled.token_id) if reason == "stop" else None,
        )

    def _text(self, token: int) -> tuple[str, FinishReason | None]:
        params = self.request.sampling
        if token in self.stop_token_ids:
            return self.text.finish(), "stop"
        shown, stopped = self.text.push(token, self.generated >= params.min_tokens)
        if stopped:
            return shown, "stop"
        if self.grammar is not None and self.grammar.ended:
            return shown + self.text.finish(), "stop"
        if self.generated >= params.max_tokens:
            return shown + self.text.finish(), "length"
        return shown, None

    def _stopped_by(self, token: int) -> str | int | None:
        return token if token in self.request.sampling.stop_token_ids else self.text.found

    def _whole_prompt_logprobs(self) -> tuple[TokenLogprob | None, ...]:
        if self.request.sampling.prompt_logprobs is None:
            return ()
        found, self.prompt_logprobs = self.prompt_logprobs, {}
        return (None, *(found[position] for position in range(1, len(self.request.prompt_token_ids))))

    def usage(self, prefill_rate: float | None) -> Usage:
        """What the request cost; `prefill_rate` is in tokens a second, if one was measured yet."""
        prompt = len(self.request.prompt_token_ids)
        sources = self.sources or TokenSources(computed=prompt)
        saved = sources.cached / prefill_rate if prefill_rate else 0.0
        # What has not come about by the end has lasted until now.
        now = time.monotonic()
        admitted = self.admitted if self.admitted is not None else now
        first = self.first_token if self.first_token is not None else now
        last = self.last_token if self.last_token is not None else first
        return Usage(
            prompt,
            self.generated,
            sources,
            first - self.submitted,
            saved,
            self.preemptions,
            queue_s=admitted - self.submitted,
            prefill_s=first - admitted,
            decode_s=last - first,
        )

    def end(self, text: str, token_ids: tuple[int, ...], reason: FinishReason, usage: Usage) -> None:
        """Sends the last chunk."""
        self.stream.put(Chunk(text, token_ids, reason, usage))
