"""`POST /v1/completions`: text in, text out, nothing added to the prompt but what the tokenizer adds."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from strata.engine.api import Chunk, TokenLogprob
from strata.serve.documented import CompletionAnswer, answer
from strata.serve.generation import Answer, respond
from strata.serve.logprobs import LogprobColumns, ShownTokens
from strata.serve.long_texts import encode_within_context
from strata.serve.protocol import COMPLETION_MAX_TOKENS, CompletionBody
from strata.serve.request_id import current_request_id
from strata.serve.service import Service


@dataclass(frozen=True)
class _Prompt:
    """What `echo` shows of a prompt. `offsets`: where its tokens begin, for a text whose log probabilities are wanted;
    of token ids, None: there the text is what the tokens say."""

    text: str
    offsets: list[int] | None


@dataclass
class _Choice:
    """A choice that has begun: the tokens of its answer, and the log probabilities that were not shown yet."""

    tokens: ShownTokens | None
    columns: LogprobColumns = field(default_factory=LogprobColumns)

    def add(self, entries: Sequence[TokenLogprob]) -> None:
        """Adds tokens of the answer."""
        if self.tokens:
            self.columns.add([entry.token_id for entry in entries], entries, self.tokens)


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
        self._choices: dict[int, _Choice] = {}
        self._prompts: dict[int, _Prompt] = {}
        """Those that were shown, by their place in the body."""

    def frame(self) -> dict[str, Any]:
        """What every object of this answer has beside its choices."""
        return self._frame

    def whole(self, answer: Answer) -> dict[str, Any]:
        """One choice that is not streamed."""
        text = self._begin(answer) + "".join(answer.text)
        self._choices[answer.index].add(answer.logprobs)
        return self._choice(answer, text)

    def piece(self, answer: Answer, chunk: Chunk) -> dict[str, Any] | None:
        """One streamed piece, once there is something to show."""
        text = "" if answer.index in self._choices else self._begin(answer)
        if not answer.silent:
            text += chunk.text
            self._choices[answer.index].add(chunk.logprobs)
        if not text and not chunk.finish_reason:
            return None
        return self._choice(answer, text)

    def _begin(self, answer: Answer) -> str:
        """Begins a choice, with its prompt's log probabilities if it has them. Returns what it shows before its
        answer."""
        prompt = self._prompt(answer.index // self._body.choices()) if self._body.echo else _Prompt("", None)
        wanted = self._body.logprobs is not None
        skips = self._body.skip_special_tokens is not False
        choice = _Choice(self._tokens(skips, len(prompt.text), answer.prompt) if wanted else None)
        self._choices[answer.index] = choice
        if answer.prompt_logprobs:
            # A text does not show the special tokens that the tokenizer adds to it.
            tokens = self._tokens(prompt.offsets is not None)
            choice.columns.add(answer.prompt, answer.prompt_logprobs, tokens, prompt.offsets)
        return prompt.text

    def _tokens(self, skip_special: bool, start: int = 0, before: Sequence[int] = ()) -> ShownTokens:
        as_ids = bool(self._body.return_tokens_as_token_ids)
        return ShownTokens(self._tokenizer, as_ids, skip_special, start, before)

    def _prompt(self, number: int) -> _Prompt:
        if number not in self._prompts:
            prompt: Any = self._body.prompts()[number]
            offsets = None
            if not isinstance(prompt, str):
                # Without a tokenizer its text is empty, as the answer's is.
                prompt = self._tokenizer.decode(prompt, skip_special_tokens=False) if self._tokenizer else ""
            elif self._body.logprobs is not None:
                offsets = self._tokenizer.token_offsets(prompt, self._body.add_special_tokens is not False)
            self._prompts[number] = _Prompt(prompt, offsets)
        return self._prompts[number]

    def _choice(self, answer: Answer, text: str) -> dict[str, Any]:
        return {
            "index": answer.index,
            "text": text,
            "logprobs": self._choices[answer.index].columns.take(),
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
