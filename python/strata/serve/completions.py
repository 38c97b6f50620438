"""`POST /v1/completions`: text in, text out, nothing added to the prompt but what the tokenizer adds."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from strata.engine.api import Chunk
from strata.serve.documented import CompletionAnswer, answer
from strata.serve.generation import Answer, respond
from strata.serve.logprobs import LogprobColumns, token_text_of
from strata.serve.long_texts import encode_within_context
from strata.serve.protocol import COMPLETION_MAX_TOKENS, CompletionBody
from strata.serve.request_id import current_request_id
from strata.serve.service import Service


class CompletionDialect:
    """OpenAI's `text_completion` objects; `n` choices a prompt. With `echo` a choice begins with its prompt."""

    def __init__(self, model: str, body: CompletionBody, tokenizer: Any) -> None:
        self._frame = {
            "id": f"cmpl-{current_request_id()}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": None,
        }
        self._body = body
        self._tokenizer = tokenizer
        self._text_of = token_text_of(tokenizer, bool(body.return_tokens_as_token_ids))
        self._columns: dict[int, LogprobColumns] = {}
        """Of the choices that have begun."""
        self._shown: dict[int, str] = {}
        """Prompts, by their place in the body."""

    def frame(self) -> dict[str, Any]:
        """What every object of this answer has beside its choices."""
        return self._frame

    def whole(self, answer: Answer) -> dict[str, Any]:
        """One choice that is not streamed."""
        text = self._echo(answer) + "".join(answer.text)
        columns = self._columns[answer.index]
        if answer.prompt_logprobs:
            columns.add(answer.prompt, answer.prompt_logprobs)
        columns.add([entry.token_id for entry in answer.logprobs], answer.logprobs)
        return self._choice(answer, text)

    def piece(self, answer: Answer, chunk: Chunk) -> dict[str, Any] | None:
        """One streamed piece, once there is something to show."""
        begins = answer.index not in self._columns
        text = self._echo(answer)
        columns = self._columns[answer.index]
        if begins and answer.prompt_logprobs:
            columns.add(answer.prompt, answer.prompt_logprobs)
        if not answer.silent:
            text += chunk.text
            columns.add([entry.token_id for entry in chunk.logprobs], chunk.logprobs)
        if not text and not chunk.finish_reason:
            return None
        return self._choice(answer, text)

    def _echo(self, answer: Answer) -> str:
        """What a choice shows before its answer; once."""
        if answer.index in self._columns:
            return ""
        self._columns[answer.index] = LogprobColumns(self._text_of)
        if not self._body.echo:
            return ""
        number = answer.index // self._body.choices()
        if number not in self._shown:
            prompt: Any = self._body.prompts()[number]
            if not isinstance(prompt, str):
                # Without a tokenizer its text is empty, as the answer's is.
                prompt = self._tokenizer.decode(prompt, skip_special_tokens=False) if self._tokenizer else ""
            self._shown[number] = prompt
        return self._shown[number]

    def _choice(self, answer: Answer, text: str) -> dict[str, Any]:
        return {
            "index": answer.index,
            "text": text,
            "logprobs": self._columns[answer.index].take(),
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stopped_by,
            **(answer.take_ids() if self._body.return_token_ids else {}),
        }


def completions_router(service: Service) -> APIRouter:
    """The route, bound to a service."""
    router = APIRouter()

    @router.post("/v1/completions", responses=answer(CompletionAnswer, streams=True))
    async def completions(body: CompletionBody, request: Request) -> Response:
        """Continues one or several prompts."""
        tokenizer = service.engine.tokenizer

        def tokenize() -> list[list[int]]:
            special = body.add_special_tokens is not False
            return [
                encode_within_context(service, prompt, "prompt", special)
                if isinstance(prompt, str)
                else prompt
                for prompt in body.prompts()
            ]

        dialect = CompletionDialect(service.model_name, body, tokenizer)
        return await respond(service, request, body, tokenize, COMPLETION_MAX_TOKENS, dialect)

    return router
