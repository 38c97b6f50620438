"""`POST /v1/completions`: text in, text out, nothing added to the prompt but what the tokenizer adds."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from strata.serve.generation import Answer, respond
from strata.serve.protocol import COMPLETION_MAX_TOKENS, CompletionBody
from strata.serve.service import Service


class CompletionDialect:
    """OpenAI's `text_completion` objects; one choice a prompt."""

    def __init__(self, model: str) -> None:
        self._frame = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    def frame(self) -> dict[str, Any]:
        """What every object of this answer has beside its choices."""
        return self._frame

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The answer that is not streamed."""
        choices = [
            _choice(index, "".join(answer.text), answer.finish_reason) for index, answer in enumerate(answers)
        ]
        return {**self._frame, "choices": choices}

    def piece(self, index: int, text: str, finish_reason: str | None, first: bool) -> dict[str, Any]:
        """One streamed piece."""
        return {**self._frame, "choices": [_choice(index, text, finish_reason)]}


def _choice(index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}


def completions_router(service: Service) -> APIRouter:
    """The route, bound to a service."""
    router = APIRouter()

    @router.post("/v1/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        """Continues one or several prompts."""

        def tokenize() -> list[list[int]]:
            encode = service.engine.tokenizer.encode
            return [list(encode(prompt)) if isinstance(prompt, str) else prompt for prompt in body.prompts()]

        dialect = CompletionDialect(service.model_name)
        return await respond(service, request, body, tokenize, COMPLETION_MAX_TOKENS, dialect)

    return router
