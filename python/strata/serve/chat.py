"""`POST /v1/chat/completions`: messages through the model's chat template, an assistant's message back."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from strata.engine.api import MOST_LOGPROBS, Chunk, TokenLogprob
from strata.serve.documented import ChatAnswer, answer
from strata.serve.errors import ApiError
from strata.serve.generation import Answer, respond
from strata.serve.logprobs import ShownTokens, chat_logprobs
from strata.serve.long_texts import encode_within_context
from strata.serve.messages import Conversation
from strata.serve.protocol import GenerationBody
from strata.serve.request_id import current_request_id
from strata.serve.service import Service
from strata.serve.tool_calls import ToolCall, ToolCallParser


class ChatBody(GenerationBody, Conversation):
    """The body of `POST /v1/chat/completions`."""

    prompt_field = "messages"
    continues_text = False

    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)

    def refuse_unsupported(self) -> None:
        """Also what makes no sense in a chat alone."""
        super().refuse_unsupported()
        if self.top_logprobs and not self.logprobs:
            message = "top_logprobs needs logprobs; set it to true as well"
            raise ApiError(400, message, "invalid_value", "top_logprobs")

    def logprob_counts(self) -> tuple[int | None, int | None]:
        """A chat's prompt has no log probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None, None


@dataclass
class _Choice:
    """What one streamed choice has said so far."""

    parser: ToolCallParser | None
    tokens: ShownTokens | None
    """Those of the answer, if their log probabilities are wanted."""
    role_said: bool = False
    calls_said: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """Of tokens whose text is still held back."""


class ChatDialect:
    """OpenAI's `chat.completion` and `chat.completion.chunk` objects; `n` choices."""

    def __init__(self, model: str, body: ChatBody, tokenizer: Any) -> None:
        self._frame = {
            "id": f"chatcmpl-{current_request_id()}",
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": None,
        }
        self._body = body
        self._tokenizer = tokenizer
        self._parses_calls = body.offers_tools() and tokenizer.template_marks_tool_calls
        self._choices: dict[int, _Choice] = {}
        self._prompt_ids: dict[str, list[int]] = {}
        """What the next object has beside its choices: a chat has one prompt."""

    def frame(self) -> dict[str, Any]:
        """What the next object of this answer has beside its choices."""
        prompt_ids, self._prompt_ids = self._prompt_ids, {}
        return {**self._frame, **prompt_ids}

    def whole(self, answer: Answer) -> dict[str, Any]:
        """One choice that is not streamed."""
        choice = self._new_choice()
        text, calls = self._parsed(choice, "".join(answer.text), ends=True)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message = {**message, "content": text or None, "tool_calls": [call.body() for call in calls]}
        return {
            "index": answer.index,
            "message": message,
            "logprobs": chat_logprobs(answer.logprobs, choice.tokens) if choice.tokens else None,
            "finish_reason": _reason(answer.finish_reason, bool(calls)),
            "stop_reason": answer.stopped_by,
            **self._ids(answer),
        }

    def piece(self, answer: Answer, chunk: Chunk) -> dict[str, Any] | None:
        """One streamed piece, once there is something to show; the first names the role."""
        if answer.index not in self._choices:
            self._choices[answer.index] = self._new_choice()
        choice = self._choices[answer.index]
        text, calls = self._parsed(choice, chunk.text, ends=chunk.finish_reason is not None)
        choice.logprobs += chunk.logprobs
        if not text and not calls and not chunk.finish_reason:
            return None
        delta: dict[str, Any] = {} if choice.role_said else {"role": "assistant"}
        choice.role_said = True
        if text or not calls:
            delta["content"] = text
        if calls:
            numbered = enumerate(calls, choice.calls_said)
            delta["tool_calls"] = [{"index": index, **call.body()} for index, call in numbered]
            choice.calls_said += len(calls)
        logprobs, choice.logprobs = choice.logprobs, []
        return {
            "index": answer.index,
            "delta": delta,
            "logprobs": chat_logprobs(logprobs, choice.tokens) if choice.tokens else None,
            "finish_reason": _reason(chunk.finish_reason, choice.calls_said > 0),
            "stop_reason": answer.stopped_by,
            **self._ids(answer),
        }

    def _ids(self, answer: Answer) -> dict[str, list[int]]:
        if not self._body.return_token_ids:
            return {}
        ids = answer.take_ids()
        prompt_ids = ids.pop("prompt_token_ids", None)
        if prompt_ids is not None and answer.first is None:
            self._prompt_ids = {"prompt_token_ids": prompt_ids}
        return ids

    def _new_choice(self) -> _Choice:
        body, tokens = self._body, None
        if body.logprobs:
            as_ids = bool(body.return_tokens_as_token_ids)
            tokens = ShownTokens(self._tokenizer, as_ids, body.skip_special_tokens is not False)
        return _Choice(ToolCallParser() if self._parses_calls else None, tokens)

    def _parsed(self, choice: _Choice, text: str, ends: bool) -> tuple[str, list[ToolCall]]:
        if choice.parser is None:
            return text, []
        shown, calls = choice.parser.push(text)
        if ends:
            rest, last = choice.parser.finish()
            return shown + rest, calls + last
        return shown, calls


def _reason(finish_reason: str | None, called: bool) -> str | None:
    return "tool_calls" if called and finish_reason == "stop" else finish_reason


def chat_router(service: Service) -> APIRouter:
    """The route, bound to a service."""
    router = APIRouter()

    @router.post("/v1/chat/completions", responses=answer(ChatAnswer, streams=True))
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        """Answers the last message of a chat."""
        tokenizer = service.tokenizer

        def tokenize() -> list[list[int]]:
            # The template has written the special tokens already.
            special = bool(body.add_special_tokens)
            return [encode_within_context(service, body.prompt(tokenizer), "messages", special)]

        dialect = ChatDialect(service.model_name, body, tokenizer)
        return await respond(service, request, body, tokenize, None, dialect)

    return router
