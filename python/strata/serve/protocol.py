"""What clients may send. Unknown fields are ignored; what would change the answer and cannot be done is
refused.

Every optional field may be null, which means its default. Defaults are OpenAI's: temperature 1, top_p 1, no
seed, 16 new tokens for completions and the rest of the context for chats.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from strata.engine.api import SamplingParams
from strata.serve.errors import ApiError

COMPLETION_MAX_TOKENS = 16

_NEUTRAL: dict[str, tuple[str, ...]] = {
    "n": ("1",),
    "best_of": ("1",),
    "echo": ("false",),
    "suffix": ('""',),
    "logprobs": ("false",),
    "top_logprobs": ("0",),
    "prompt_logprobs": ("0",),
    "presence_penalty": ("0", "0.0"),
    "frequency_penalty": ("0", "0.0"),
    "repetition_penalty": ("1", "1.0"),
    "min_p": ("0", "0.0"),
    "logit_bias": ("{}",),
    "response_format": ('{"type": "text"}',),
    "tools": ("[]",),
    "functions": ("[]",),
}
"""Fields that Strata does not act on, with the JSON values (beside null) that ask for nothing. Another value
is refused: an answer that silently disregards it would be wrong."""

TokenIds = Annotated[list[Annotated[int, Field(ge=0, strict=True)]], Field(fail_fast=True)]


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
    | Annotated[list[TokenIds], Tag("id_lists")],
    Discriminator(_prompt_kind),
]


class StreamOptions(BaseModel):
    """What a stream carries beside the text."""

    include_usage: bool | None = None


class GenerationBody(BaseModel):
    """The fields that completions and chats share."""

    model_config = ConfigDict(extra="allow")
    prompt_field: ClassVar[str] = "prompt"
    """The field that errors about the prompt's length name."""

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(None, ge=0)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: int | None = None
    cache_write: bool | None = None

    @property
    def wants_usage_chunk(self) -> bool:
        """Whether the stream ends with a chunk that has usage and no choices."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def refuse_unsupported(self) -> None:
        """Raises ApiError 400 for the first field that asks for what Strata does not do."""
        for name, value in (self.model_extra or {}).items():
            if value is None or name not in _NEUTRAL or json.dumps(value) in _NEUTRAL[name]:
                continue
            remedy = f"leave it out or send {_NEUTRAL[name][0]}"
            raise ApiError(
                400, f"{name}={json.dumps(value)[:80]} is not supported; {remedy}", "unsupported_value", name
            )

    def token_limit(self) -> int | None:
        """The number of new tokens that the client asked for, if it did."""
        return self.max_tokens

    def sampling(self, max_tokens: int) -> SamplingParams:
        """The engine's parameters. Raises ApiError 400."""
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if "" in stops:
            raise ApiError(
                400,
                "stop holds an empty text, which would stop at once; leave it out",
                "invalid_value",
                "stop",
            )
        if self.min_tokens and self.min_tokens > max_tokens:
            message = f"min_tokens {self.min_tokens} is more than max_tokens {max_tokens}; lower it"
            raise ApiError(400, message, "invalid_value", "min_tokens")
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(0, self.top_k or 0),  # clients spell "all tokens" as -1 or 0
            seed=self.seed,
            stop=stops,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            min_tokens=self.min_tokens or 0,
        )


class CompletionBody(GenerationBody):
    """The body of `POST /v1/completions`: one prompt or several, as texts or token ids."""

    prompt: Prompt

    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts as a list; one choice comes back for each."""
        prompt: Any = self.prompt
        return (
            prompt if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list) else [prompt]
        )


class ContentPart(BaseModel):
    """A part of a message's content; only text parts can be answered."""

    type: str
    text: str | None = None


class ChatMessage(BaseModel):
    """One message of a chat."""

    role: str
    content: str | list[ContentPart] | None = None

    def for_template(self) -> dict[str, str]:
        """Role and text as the chat template takes them. Raises ApiError 400 for parts that are not text."""
        role = "system" if self.role == "developer" else self.role  # OpenAI's newer name for the same thing
        if not isinstance(self.content, list):
            return {"role": role, "content": self.content or ""}
        for part in self.content:
            if part.type != "text":
                message = f"a content part of type {part.type!r} is not supported; send parts of type 'text'"
                raise ApiError(400, message, "unsupported_value", "messages")
        return {"role": role, "content": "".join(part.text or "" for part in self.content)}


class ChatBody(GenerationBody):
    """The body of `POST /v1/chat/completions`."""

    prompt_field = "messages"

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)

    def token_limit(self) -> int | None:
        """`max_completion_tokens`, or its older name `max_tokens`."""
        return self.max_completion_tokens or self.max_tokens


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

    tiers: list[str] = Field(min_length=1)
