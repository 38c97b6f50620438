"""What an engine is to the server, the benches and library users: the words of the conversation, no behaviour.

A stream yields `Chunk`s in order and ends with exactly one chunk that has a finish reason, whatever happens:
also when the request is aborted or the engine stops. Errors that end a request are raised by the stream.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from strata.engine.context import ContextBounds

TIERS: tuple[str, ...] = ("device", "host", "disk")
"""Tier names from the fastest down, as flags, JSON and metrics spell them."""

WAITING_KINDS: tuple[str, ...] = (
    "next",
    "loads",
    "held",
    "deferred",
    "taken_over",
    "set_aside",
    "no_room",
    "behind",
    "batch_full",
    "running_full",
    "decode_first",
    "left_out",
)
"""What a request may wait for, in one word each: it goes with the next step; its pages load; its prefetch runs; another
request computes its tokens, or is overdue with them; its load would stall the batch; the device has no room, for it or
for one before it; the batch has its tokens; as many run as may; running streams go first; a policy leaves it out."""

MOST_LOGPROBS = 20
"""Alternatives that a request may ask for with each token."""

MOST_STOPS = 64
LONGEST_STOP = 1000
"""How many stop texts a request may have, and their characters: they are looked for after each token."""

MOST_BIASES = 1024
"""Tokens whose logits a request may change."""

LEAST_REPETITION, MOST_REPETITION = 0.01, 100.0
"""What a repetition penalty may be: beyond, logits run over."""

LONGEST_SALT = 2048
"""Characters of a `cache_salt`."""

MOST_PROMPT_LOGPROBS = 1 << 19
"""Log probabilities that a prompt's tokens and their alternatives may have together."""

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Grammar:
    """What an answer must fit: a JSON schema as JSON text, a regular expression, or a Lark grammar. `asked_as`
    is the field of the request that holds it, for errors."""

    kind: Literal["json_schema", "regex", "lark"]
    source: str
    asked_as: str | None = field(default=None, compare=False)


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen, and when to stop.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 keep every token. `seed` None draws one at random.
    With the same seed the same text comes out, whatever else is in the batch. `stop` texts are not part of the output
    unless `include_stop`. `repetition_penalty` counts the tokens of prompt and answer, `presence_penalty` and
    `frequency_penalty` those of the answer alone; `logit_bias` adds to the logits of token ids. With `logprobs` each
    token comes with its log probability and those of so many likeliest tokens, by the model's own distribution, before
    all that changes it. With `prompt_logprobs` the prompt's tokens have them too: such a prompt is computed in full
    and its KV is not kept.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop: bool = False
    grammar: Grammar | None = None

    @cached_property
    def bias_arrays(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """`logit_bias` as token ids and values, made once for all tokens of the answer."""
        ids = np.array([token for token, _ in self.logit_bias], np.int64)
        return ids, np.array([value for _, value in self.logit_bias], np.float64)


@dataclass(frozen=True)
class GenerationRequest:
    """A prompt as token ids (at least one) and what to do with it.

    `cache_salt` isolates tenants: pages of two salts never match. Higher `priority` goes first. Without
    `cache_write` nothing that this request computes is kept for others or written to lower tiers; what is cached
    already is used either way. An answer that `continues_text` goes on where the prompt's text ends; one that does not,
    as in a chat, is a text of its own: some tokenizers drop the space before its first word.
    """

    prompt_token_ids: Sequence[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    cache_salt: str = ""
    priority: int = 0
    cache_write: bool = True
    continues_text: bool = True


@dataclass(frozen=True)
class TokenSources:
    """Where a prompt's tokens came from. The four sum to the prompt's length."""

    device: int = 0
    host: int = 0
    disk: int = 0
    computed: int = 0

    @property
    def cached(self) -> int:
        """Prompt tokens that were not computed again."""
        return self.device + self.host + self.disk


@dataclass(frozen=True)
class Usage:
    """Token counts and times of one request. Times are seconds; `ttft_s` counts from submission.

    `saved_s` is the engine's own estimate of the prefill time that the cached tokens saved, from the steps measured
    before serving and since; 0.0 if nothing was cached.
    `preemptions` counts how often the request gave its pages up for older ones. The request waited `queue_s` until a
    step computed for it first, had its first token after another `prefill_s`, its last after another `decode_s`.
    """

    prompt_tokens: int
    completion_tokens: int
    sources: TokenSources
    ttft_s: float
    saved_s: float
    preemptions: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0


@dataclass(frozen=True)
class TokenLogprob:
    """A token with its natural log probability, and the likeliest ones in its place as (id, log probability)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Chunk:
    """A piece of a stream. `text` never ends inside a character. `usage` is set on the last chunk.

    `logprobs` has one entry for each of `token_ids` if the request asked for them. `prompt_logprobs` comes with the
    first token: one entry for each token of the prompt, None for the first, which nothing predicts. `stopped_by` is
    which of the request's `stop` or `stop_token_ids` ended it; None where the model itself or a grammar did.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    stopped_by: str | int | None = None


@dataclass(frozen=True)
class Progress:
    """How far a prompt is. `done_tokens` are in place, cached ones too; `remaining_s` is an estimate, None while there
    is nothing to base it on. `sources` is None until the request runs, then says where this run found the prompt."""

    prompt_tokens: int
    done_tokens: int
    remaining_s: float | None
    sources: TokenSources | None = None


class RequestStream(Protocol):
    """The answer to one request. May be read from any one thread or any one event loop, once. Hashable. `prompt` is
    uint32 [prompt tokens], shared with the engine: not to be written to."""

    request_id: int
    prompt: npt.NDArray[np.uint32]

    def __iter__(self) -> Iterator[Chunk]: ...

    def __aiter__(self) -> AsyncIterator[Chunk]: ...

    def abort(self) -> None:
        """Ends the request early; from any thread, without blocking. Idempotent; the stream still ends with one
        `abort` chunk."""

    def progress(self) -> Progress:
        """How far the prompt is; from any thread, without blocking."""


@dataclass(frozen=True)
class TierReport:
    """One line of the banner and one entry of `/cache`. Sizes are bytes; `detail` names path, engine, reason."""

    name: str
    enabled: bool
    capacity_bytes: int
    used_bytes: int
    pinned_bytes: int
    used_tokens: int
    detail: str
    off_reason: str | None = None


@dataclass(frozen=True)
class Health:
    """`ok` is False once the engine cannot answer requests; `problems` are sentences for an operator."""

    ok: bool
    ready: bool
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class WaitingReport:
    """A request in the queue: its number, the seconds since it was submitted, why it waits in a sentence, and the same
    as one of `WAITING_KINDS`."""

    request_id: int
    waited_s: float
    why: str
    kind: str = ""


class EngineProtocol(Protocol):
    """What the server needs. `strata.engine.Engine` implements it; tests use a fake."""

    model_name: str
    context: ContextBounds
    tokenizer: Any  # strata.models.tokenizer.Tokenizer: encode, decode, apply_chat_template
    sampling_defaults: Mapping[str, float]
    """What the model's makers want for fields that a request leaves out, by the name of the field."""

    @property
    def max_context(self) -> int:
        """`context.tokens`."""

    def submit(self, request: GenerationRequest) -> RequestStream:
        """Queues a request. Raises RequestError (can never fit, bad tokens) or CapacityError (queue full)."""

    def health(self) -> Health: ...

    def tiers(self) -> list[TierReport]: ...

    def stats(self) -> dict[str, float]:
        """Counters and gauges by flat name, e.g. `prompt_tokens_device`, `load_bytes`, `running`, `waiting`."""

    def waiting(self) -> list[WaitingReport]:
        """Why each waiting request waits, in the order in which they would go."""

    def check(self) -> bool:
        """Proves that tree, pools and pins agree; raises StorageError with what does not. True if the engine was
        idle, when the proof is the strictest: nothing may be pinned or reserved."""

    def flush(self, timeout_s: float = 60.0) -> dict[str, int]:
        """Forgets every page of this model that no request uses, in all tiers. Returns pages dropped by tier; raises
        StorageError if records on disk could not be cleared."""

    def demote(self, tiers: Sequence[str], timeout_s: float = 60.0) -> dict[str, int]:
        """Empties the given tiers downward. Returns pages moved and dropped, e.g. `{"device_moved": 250, ...}`."""

    def resize(self, tier: str, size_bytes: int, timeout_s: float = 60.0) -> dict[str, int]:
        """Gives a tier another size while requests run. Returns `{"bytes": ..., "timed_out": ...}`."""

    def attach_disk(self, path: Path | None = None, capacity: int | None = None) -> None:
        """Opens a disk root while requests run."""

    def detach_disk(self, timeout_s: float = 60.0) -> bool:
        """Closes the disk tier while requests run; False if something still used it."""

    def shutdown(self, drain_s: float, demote_s: float) -> dict[str, int]:
        """Ends: finishes running requests within `drain_s`, moves pages to disk within `demote_s`. Returns pages moved
        and dropped, and those that each tier held at the end, e.g. `{"disk_resident_pages": 250, ...}`; nothing
        without a disk tier. Idempotent."""
