"""What clients may send. Unknown fields are ignored; what would change the answer and cannot be done is
refused.

Every optional field may be null, which means its default. Defaults are OpenAI's: temperature 1, top_p 1, no
seed, 16 new tokens for completions and the rest of the context for chats; where the model's generation_config.json has
others, `generation` fills those in.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

from strata.engine.api import (
    LEAST_REPETITION,
    LONGEST_SALT,
    LONGEST_STOP,
    MOST_BIASES,
    MOST_LOGPROBS,
    MOST_REPETITION,
    MOST_STOPS,
    SamplingParams,
)
from strata.serve.errors import ApiError
from strata.serve.response_format import FormatFields

COMPLETION_MAX_TOKENS = 16

_NEUTRAL: dict[str, tuple[str, ...]] = {
    "suffix": ('""',),
    "prompt_logprobs": (),
    "prompt_embeds": ("[]",),
    "truncate_prompt_tokens": (),
    "use_beam_search": ("false",),
    "bad_words": ("[]",),
    "allowed_token_ids": (),
    "logits_processors": ("[]",),
    "guided_grammar": (),
    "guided_whitespace_pattern": (),
    "ebnf": (),
    "stop_regex": ('""', "[]"),
    "no_stop_trim": ("false",),
    "lora_path": (),
    "custom_logit_processor": (),
    "return_hidden_states": ("false",),
    "functions": ("[]",),
    "function_call": ('"none"', '"auto"'),
    "documents": ("[]",),
    "modalities": ('["text"]',),
    "continue_final_message": ("false",),
    "chat_template": (),
    "echo": ("false",),
}
"""Fields that Strata does not act on, with the JSON values (beside null) that ask for nothing. Another value
is refused: an answer that silently disregards it would be wrong."""

_MOST_CHOICES = 128
_TOO_LARGE = 2**31
"""Above every token id, length and priority: a number that does not end would be work of its own."""
_LONGEST_SALT = LONGEST_SALT // 2
"""The name of its key may come before it."""

Finite = Annotated[float, Field(allow_inf_nan=False)]
TokenId = Annotated[int, Field(ge=0, lt=_TOO_LARGE)]
WholeNumber = Annotated[int, Field(gt=-_TOO_LARGE, lt=_TOO_LARGE)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=_TOO_LARGE, strict=True)]], Field(fail_fast=True)]


def _prompt_kind(prompt: Any) -> str:
    """Which form a prompt has, by its first element alone: trying every form on 100,000 ids would be slow."""
    if isinstance(prompt, str):
        return "text"
    first = prompt[0] if isinstance(prompt, list) and prompt else None
    if isinstance(first, str):
        return "texts"
    return "id_lists" if isinstance(first, list) else "ids"


Prompt = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[Annotated[list[str], Field(fail_fast=True)], Tag("texts")]
    | Annotated[TokenIds, Tag("ids")]
    | Annotated[Annotated[list[TokenIds], Field(fail_fast=True)], Tag("id_lists")],
    Discriminator(_prompt_kind),
]


def _false_is_none(value: Any) -> Any:
    """Some clients send the chats' spelling of no log probabilities."""
    return None if value is False else value


def _few_biases(value: Any) -> Any:
    """Looks at the number before the entries: each bad one would be an error of its own."""
    if isinstance(value, dict) and len(value) > MOST_BIASES:
        raise ValueError(f"names {len(value)} tokens; at most {MOST_BIASES} can be given")
    return value


def _few_stops(value: Any) -> Any:
    """Both forms of `stop` have the same bounds, so that one sentence says what is wrong."""
    stops = value if isinstance(value, list) else [value]
    if len(stops) > MOST_STOPS:
        raise ValueError(f"holds {len(stops)} texts; at most {MOST_STOPS} can be given")
    if any(isinstance(stop, str) and len(stop) > LONGEST_STOP for stop in stops):
        raise ValueError(f"holds a text of more than {LONGEST_STOP} characters; give shorter ones")
    return value


LogitBias = Annotated[dict[TokenId, Annotated[float, Field(ge=-100, le=100)]], BeforeValidator(_few_biases)]


class StreamOptions(BaseModel):
    """What a stream carries beside the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(FormatFields):
    """The fields that completions and chats share."""

    model_config = ConfigDict(extra="allow")
    prompt_field: ClassVar[str] = "prompt"
    """The field that errors about the prompt's length name."""
    continues_text: ClassVar[bool] = True
    """Whether the answer goes on with the prompt's text."""

    model: str | None = None
    max_tokens: int | None = Field(None, ge=0, lt=_TOO_LARGE)
    max_completion_tokens: int | None = Field(None, ge=0, lt=_TOO_LARGE)
    n: int | None = Field(None, ge=1, le=_MOST_CHOICES)
    best_of: int | None = Field(None, ge=1, le=_MOST_CHOICES)
    temperature: Finite | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=_TOO_LARGE)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=LEAST_REPETITION, le=MOST_REPETITION)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: LogitBias | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Annotated[str | Annotated[list[str], Field(fail_fast=True)], BeforeValidator(_few_stops)] | None = (
        None
    )
    stop_token_ids: list[WholeNumber] | None = Field(None, fail_fast=True)
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(None, ge=0, lt=_TOO_LARGE)
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    add_special_tokens: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = Field(None, max_length=_LONGEST_SALT)
    priority: WholeNumber | None = None
    cache_write: bool | None = None

    @property
    def wants_running_usage(self) -> bool:
        """Whether every piece of the stream says how many tokens there are so far."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def wants_usage_chunk(self) -> bool:
        """Whether the stream ends with a chunk that has usage and no choices."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def refuse_unsupported(self) -> None:
        """Raises ApiError 400 for the first field that asks for what Strata does not do."""
        for name, value in (self.model_extra or {}).items():
            if value is None or name not in _NEUTRAL or json.dumps(value) in _NEUTRAL[name]:
                continue
            remedy = f"leave it out or send {(*_NEUTRAL[name], 'null')[0]}"
            raise ApiError(
                400, f"{name}={json.dumps(value)[:80]} is not supported; {remedy}", "unsupported_value", name
            )
        if self.best_of is not None and self.best_of != self.choices():
            message = f"best_of={self.best_of} is not supported; leave it out or make it equal to n"
            raise ApiError(400, message, "unsupported_value", "best_of")
        if self.token_limit() == 0 and not self.may_be_silent():
            message = "max_tokens is 0: ask for at least one token, or set echo to get the prompt back"
            raise ApiError(400, message, "invalid_value", "max_tokens")
        # What is left means nothing, and may be large.
        (self.model_extra or {}).clear()

    def choices(self) -> int:
        """Answers to each prompt."""
        return self.n or 1

    def prompt_count(self) -> int:
        """Prompts in this body."""
        return 1

    def may_be_silent(self) -> bool:
        """Whether an answer without any token makes sense."""
        return False

    def is_large(self) -> bool:
        """Whether an answer may hold much beside its text."""
        return self.may_be_silent() or bool(self.return_token_ids) or self.logprob_counts() != (None, None)

    def token_limit(self) -> int | None:
        """The number of new tokens that the client asked for, if it did: the newer of the two names counts."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def logprob_counts(self) -> tuple[int | None, int | None]:
        """How many alternatives each token of the answer and of the prompt come with; None for no log probability."""
        return None, None

    def sampling(self) -> SamplingParams:
        """The engine's parameters for every prompt, but for `max_tokens`. Raises ApiError 400."""
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if "" in stops:
            raise ApiError(
                400,
                "stop holds an empty text, which would stop at once; leave it out",
                "invalid_value",
                "stop",
            )
        logprobs, prompt_logprobs = self.logprob_counts()
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(0, self.top_k or 0),  # clients spell "all tokens" as -1 or 0
            seed=self.seed,
            stop=stops,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            min_tokens=self.min_tokens or 0,
            min_p=self.min_p or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=tuple((self.logit_bias or {}).items()),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            skip_special_tokens=self.skip_special_tokens is not False,
            include_stop=bool(self.include_stop_str_in_output),
            grammar=self.grammar(),
        )


class CompletionBody(GenerationBody):
    """The body of `POST /v1/completions`: one prompt or several, as texts or token ids."""

    prompt: Prompt
    echo: bool | None = None
    logprobs: Annotated[
        Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None, BeforeValidator(_false_is_none)
    ] = None

    def prompt_count(self) -> int:
        """One or several."""
        return len(self.prompts())

    def may_be_silent(self) -> bool:
        """The prompt alone may be the answer."""
        return bool(self.echo)

    def logprob_counts(self) -> tuple[int | None, int | None]:
        """With `echo` the prompt's tokens have theirs too."""
        return self.logprobs, self.logprobs if self.echo else None

    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts as a list; one choice comes back for each."""
        prompt: Any = self.prompt
        return (
            prompt if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list) else [prompt]
        )


class ResizeBody(BaseModel):
    """The body of `POST /cache/resize`: a tier and its new size, in bytes or as `8GiB`."""

    tier: str
    size: int | str


class AttachBody(BaseModel):
    """The body of `POST /cache/disk/attach`: where, and how much; what the server was started with if left out."""

    path: str | None = None
    capacity: int | str | None = None


class DemoteBody(BaseModel):
    """The body of `POST /cache/demote`: the tiers to empty downward."""

    tiers: list[str] = Field(min_length=1, fail_fast=True)
