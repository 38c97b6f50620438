"""`POST /v1/chat/completions`: messages through the model's chat template, an assistant's message back."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from strata.serve.generation import Answer, respond
from strata.serve.protocol import ChatBody
from strata.serve.service import Service


class ChatDialect:
    """OpenAI's `chat.completion` and `chat.completion.chunk` objects; always one choice."""

    def __init__(self, model: str, streamed: bool) -> None:
        self._frame = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion.chunk" if streamed else "chat.completion",
            "created": int(time.time()),
            "model": model,
        }

    def frame(self) -> dict[str, Any]:
        """What every object of this answer has beside its choices."""
        return self._frame

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The answer that is not streamed."""
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": "".join(answer.text)},
                "logprobs": None,
                "finish_reason": answer.finish_reason,
            }
            for index, answer in enumerate(answers)
        ]
        return {**self._frame, "choices": choices}

    def piece(self, index: int, text: str, finish_reason: str | None, first: bool) -> dict[str, Any]:
        """One streamed piece; the first names the role."""
        delta = {"role": "assistant", "content": text} if first else {"content": text}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return {**self._frame, "choices": [choice]}


def chat_router(service: Service) -> APIRouter:
    """The route, bound to a service."""
    router = APIRouter()

    @router.post("/v1/chat/completions")
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        """Answers the last message of a chat."""

        def tokenize() -> list[list[int]]:
            tokenizer = service.engine.tokenizer
            text = tokenizer.apply_chat_template([message.for_template() for message in body.messages])
            # The template has written the special tokens already.
            return [list(tokenizer.encode(text, add_special_tokens=False))]

        dialect = ChatDialect(service.model_name, bool(body.stream))
        return await respond(service, request, body, tokenize, None, dialect)

    return router
