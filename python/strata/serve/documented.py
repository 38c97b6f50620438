"""What `/openapi.json` says of answers. Routes make these themselves, so that FastAPI cannot know them; the tests hold
answers against it.
"""

from __future__ import annotations

from typing import Any

# pydantic takes those of `typing` from Python 3.12 on.
from typing_extensions import NotRequired, TypedDict


class ErrorDetails(TypedDict):
    """`param` is the field that an error is about, `code` tells one kind from another."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    """OpenAI's error object."""

    error: ErrorDetails


class PromptDetails(TypedDict):
    """Of a prompt's tokens."""

    cached_tokens: int


class StrataUsage(TypedDict):
    """Prompt tokens by the tier that had them, and seconds."""

    device: int
    host: int
    disk: int
    computed: int
    ttft_s: float
    queue_s: float
    prefill_s: float
    decode_s: float
    saved_s: float


class AnswerUsage(TypedDict):
    """OpenAI's usage, and Strata's."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    strata: StrataUsage


class CompletionLogprobs(TypedDict):
    """Columns of one length: a place for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(TypedDict):
    """One answer to one prompt."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]


class CompletionAnswer(TypedDict):
    """The answer of `/v1/completions`, or an event of a streamed one."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: None
    choices: list[CompletionChoice]
    usage: AnswerUsage


class CalledFunction(TypedDict):
    """The function that is called, and its arguments as JSON text."""

    name: str
    arguments: str


class AnsweredToolCall(TypedDict):
    """A call that the model makes."""

    id: str
    type: str
    function: CalledFunction


class AnswerMessage(TypedDict):
    """What the assistant says."""

    role: str
    content: str | None
    refusal: None
    tool_calls: NotRequired[list[AnsweredToolCall]]


class ChatLogprob(TypedDict):
    """A token and its log probability; `bytes` are those of its text."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(ChatLogprob):
    """A token of the answer, beside the likeliest in its place."""

    top_logprobs: list[ChatLogprob]


class ChatLogprobs(TypedDict):
    """Each token of the answer."""

    content: list[ChatTokenLogprob]
    refusal: None


class ChatChoice(TypedDict):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    token_ids: NotRequired[list[int]]


class ChatAnswer(TypedDict):
    """The answer of `/v1/chat/completions`. A streamed one's events have `delta` in place of `message`."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: None
    prompt_token_ids: NotRequired[list[int]]
    choices: list[ChatChoice]
    usage: AnswerUsage


class TokenizeAnswer(TypedDict):
    """Token ids; `token_strs` are their texts, where `return_token_strs` asked for these."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeAnswer(TypedDict):
    """The text of token ids."""

    prompt: str


Responses = dict[int | str, dict[str, Any]]

FAILURES: Responses = {
    "4XX": {
        "model": ErrorBody,
        "description": "The request must change; 429: send it again after `Retry-After`",
    },
    "5XX": {
        "model": ErrorBody,
        "description": "503: send it again after `Retry-After`; 500: a defect of Strata",
    },
}
"""Of every route, in place of FastAPI's 422."""


def answer(model: Any, streams: bool = False) -> Responses:
    """A route's answer: an object, or server-sent events with such objects."""
    events = {"text/event-stream": {"schema": {"type": "string"}}}
    return {200: {"model": model, **({"content": events} if streams else {})}}


NOT_NOW: Responses = {503: {"description": "Not now; the body says why", "content": {"application/json": {}}}}
"""Of the routes that say how the server is, whose answers have their own shape."""

TEXT: Responses = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}
"""Of a route whose answer is no JSON."""
