"""The answers that the engine has not finished: from a step's logits to tokens, text and streams. What becomes of a
request is written down only once its step is known to have succeeded.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch

from strata._core import Plan
from strata.engine.api import Chunk, SamplingParams, TokenSources
from strata.engine.histogram import GAPS_S, STEP_TOKENS, Histogram
from strata.engine.logit_rules import Row
from strata.engine.logprobs import hidden_logprobs
from strata.engine.sampler import Sampled, sample_rows
from strata.engine.sequence import Sequence
from strata.errors import CapacityError, RequestError, StrataError

_log = logging.getLogger("strata.engine")

_RATE_WEIGHT = 0.3
"""Weight of the newest prefill step in the running estimate of tokens a second."""
_NOBODY = Row(SamplingParams())


@dataclass(frozen=True)
class Taken:
    """What a step's tokens led to: for each row of its plan the token, if one was sampled, and whether the answer ends
    with it; and the chunks to send."""

    tokens: list[int | None]
    ended: list[bool]
    chunks: list[tuple[Sequence, Chunk]]


class Answers:
    """Requests come and leave from any thread; the rest belongs to the engine's thread."""

    def __init__(self, max_running: int, max_waiting: int) -> None:
        self._most = max_running + max_waiting
        self._lock = threading.Lock()
        self.sequences: dict[int, Sequence] = {}
        self.last_tokens: dict[int, int] = {}
        """The last token of every request whose next row may need it."""
        self.prefill_rate: float | None = None
        """Prompt tokens computed in a second, if measured yet."""
        self.token_gaps = Histogram("token_gap", "sum_s", GAPS_S)
        self.step_tokens = Histogram("step_tokens", "sum", STEP_TOKENS)
        self.draining = False

    # --- from any thread --------------------------------------------------------------------------------------

    def add(self, number: int, sequence: Sequence) -> None:
        """Takes a request in. Raises CapacityError when there are too many, or no more are taken."""
        with self._lock:
            if self.draining:
                raise CapacityError("the server is shutting down: try again in a minute")
            if len(self.sequences) >= self._most:
                raise CapacityError(
                    f"{len(self.sequences)} requests are running or waiting (--max-running + --max-waiting "
                    f"= {self._most}): try again later"
                )
            self.sequences[number] = sequence

    def remove(self, number: int) -> Sequence | None:
        """Forgets a request; None if it has ended."""
        with self._lock:
            return self.sequences.pop(number, None)

    def drain(self) -> bool:
        """Takes no more requests in. False if that was so already."""
        with self._lock:
            first, self.draining = not self.draining, True
        return first

    # --- a step, from the engine's thread ---------------------------------------------------------------------

    def scored_rows(self, plan: Plan) -> list[int]:
        """The plan's rows that compute a prompt whose tokens' log probabilities are wanted."""
        return [
            row
            for row, number in enumerate(plan.requests)
            if (sequence := self.sequences.get(number)) is not None
            and sequence.request.sampling.prompt_logprobs is not None
            and not sequence.output
        ]

    def sample(self, plan: Plan, logits: torch.Tensor) -> dict[int, Sampled]:
        """The next token of each request whose row asks for one."""
        requests = [number for number, sample in zip(plan.requests, plan.samples, strict=True) if sample]
        # A request that was aborted meanwhile still gets a token: Core may not have heard of the abort.
        sequences = [self.sequences.get(number) for number in requests]
        rows = [sequence.row() if sequence else _NOBODY for sequence in sequences]
        return dict(zip(requests, sample_rows(logits, rows), strict=True))

    def score(
        self,
        plan: Plan,
        rows: SequenceOf[int],
        hidden: torch.Tensor,
        project: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """Adds the log probabilities of prompt tokens, given the hidden states of these rows' tokens. What is added is
        the same however often it is computed."""
        lengths = plan.query_lengths
        starts, positions = np.cumsum([0, *lengths]), plan.positions()
        done = 0
        for row in rows:
            states = hidden[done : done + lengths[row]]
            done += lengths[row]
            sequence = self.sequences.get(plan.requests[row])
            if sequence is None:
                continue
            # A token's hidden state predicts the one after it.
            first = int(positions[starts[row]]) + 1
            predicted = sequence.request.prompt_token_ids[first : first + lengths[row]]
            count = sequence.request.sampling.prompt_logprobs or 0
            sequence.add_prompt_logprobs(first, hidden_logprobs(project, states, predicted, count))

    def measure(self, tokens: int, seconds: float) -> None:
        """Notes how long a prefill step took."""
        # Small chunks pay the weights' streaming, not the tokens' compute: no measure of what a prompt costs.
        if tokens >= 64 and seconds > 0:
            rate = tokens / seconds
            old = self.prefill_rate
            self.prefill_rate = rate if old is None else old + _RATE_WEIGHT * (rate - old)

    def note_begun(self, plan: Plan, now: float) -> None:
        """Notes which requests run from here on: their cached tokens are behind them."""
        pace = 1 / self.prefill_rate if self.prefill_rate else None
        for row, device, host, disk, computed, _ in plan.admitted:
            sequence = self.sequences.get(plan.requests[row])
            if sequence is not None:
                sources = TokenSources(device, host, disk, computed)
                sequence.stream.prefill.begin(sources.cached, sources, now, pace)

    def note_progress(self, plan: Plan) -> None:
        """Notes how far the prompts are after a step that succeeded."""
        now = time.monotonic()
        for number, done in zip(plan.requests, plan.context_lengths, strict=True):
            sequence = self.sequences.get(number)
            if sequence is not None:
                sequence.stream.prefill.note(done, now)

    def note_admitted(self, plan: Plan, started: float) -> None:
        """Notes where the prompts came from that this plan has admitted, and that it began to compute at `started`."""
        for row, device, host, disk, computed, preemptions in plan.admitted:
            sequence = self.sequences.get(plan.requests[row])
            if sequence is None:
                continue
            sequence.preemptions = preemptions
            # A request that comes back after a preemption finds its own pages: the first admission counts.
            if sequence.sources is None:
                sequence.sources = TokenSources(device, host, disk, computed)
                sequence.admitted = started

    def take(self, plan: Plan, sampled: dict[int, Sampled]) -> Taken:
        """Adds the tokens of a step that succeeded to their answers."""
        self.step_tokens.add(sum(plan.query_lengths))
        finished: set[int] = set()
        chunks: list[tuple[Sequence, Chunk]] = []
        for number, token in sampled.items():
            self.last_tokens[number] = token.token_id
            sequence = self.sequences.get(number)
            if sequence is None:
                continue
            former = sequence.last_token
            try:
                chunk = sequence.take(token, self.prefill_rate)
            except RequestError as error:
                self.give_up(number, error)
                finished.add(number)
                continue
            except Exception as error:  # noqa: BLE001 - one answer's text must not end the others
                _log.exception("request %d cannot be turned into text", number)
                self.give_up(number, StrataError(f"the answer cannot be turned into text: {error}"))
                finished.add(number)
                continue
            if former is not None and sequence.last_token is not None:
                self.token_gaps.add(sequence.last_token - former)
            chunks.append((sequence, chunk))
            if chunk.finish_reason is not None:
                finished.add(number)
        keep = sampled.keys() | self.sequences.keys()
        self.last_tokens = {number: token for number, token in self.last_tokens.items() if number in keep}
        tokens = [sampled[number].token_id if number in sampled else None for number in plan.requests]
        return Taken(tokens, [number in finished for number in plan.requests], chunks)

    # --- what clients get -------------------------------------------------------------------------------------

    def send(self, chunks: list[tuple[Sequence, Chunk]]) -> None:
        """Sends chunks to their readers; a finished request is forgotten."""
        for sequence, chunk in chunks:
            number = sequence.stream.request_id
            with self._lock:
                # Removed by an abort in the meantime: its stream has ended already.
                living = self.sequences.get(number) is sequence
                if living and chunk.finish_reason is not None:
                    del self.sequences[number]
            if living:
                sequence.stream.put(chunk)

    def give_up(self, number: int, error: StrataError) -> None:
        """Ends a request with an error."""
        sequence = self.remove(number)
        if sequence is not None:
            sequence.stream.put(error)

    def end_all(self, reason: str) -> None:
        """Ends every request with an error, since the engine has stopped."""
        with self._lock:
            sequences, self.sequences = list(self.sequences.values()), {}
        for sequence in sequences:
            sequence.stream.put(StrataError(f"the engine has stopped: {reason}"))
