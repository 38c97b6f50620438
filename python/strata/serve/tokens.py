"""`/tokenize`, `/detokenize` and `/tokenizer_info`, in the shape that vLLM gave them: for clients that count or send
token ids."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Discriminator, Tag
from starlette.responses import Response

from strata.errors import RequestError
from strata.serve.documented import DetokenizeAnswer, TokenizeAnswer, answer
from strata.serve.long_texts import encode_within_context
from strata.serve.messages import Conversation
from strata.serve.protocol import TokenIds
from strata.serve.service import Service

_TEXT, _CHAT = "the form of a text", "the form of a chat"
"""No names of fields: errors leave them out."""


class TokenizeText(BaseModel):
    """A text to tokenise, by default as a completion's prompt would be."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    def token_ids(self, service: Service) -> list[int]:
        """Blocks; to be called in a worker thread. Raises ApiError 400 for a text far beyond the context."""
        return encode_within_context(service, self.prompt, "prompt", self.add_special_tokens is not False)


class TokenizeChat(Conversation):
    """A chat to tokenise, as `/v1/chat/completions` would."""

    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    def token_ids(self, service: Service) -> list[int]:
        """Blocks; to be called in a worker thread. Raises ApiError 400 or RequestError."""
        text = self.prompt(service.tokenizer)
        return encode_within_context(service, text, "messages", bool(self.add_special_tokens))


def _kind(body: Any) -> str:
    return _CHAT if isinstance(body, dict) and "messages" in body else _TEXT


TokenizeBody = Annotated[
    Annotated[TokenizeText, Tag(_TEXT)] | Annotated[TokenizeChat, Tag(_CHAT)], Discriminator(_kind)
]


class DetokenizeBody(BaseModel):
    """The body of `POST /detokenize`."""

    model: str | None = None
    tokens: TokenIds


def tokens_router(service: Service) -> APIRouter:
    """The routes, bound to a service."""
    router = APIRouter()

    @router.post("/tokenize", responses=answer(TokenizeAnswer))
    async def tokenize(body: TokenizeBody) -> Response:
        """The token ids of a text or a chat, and how many there are."""
        service.check_model(body.model)
        tokenizer = service.tokenizer

        def answered() -> Response:
            ids = body.token_ids(service)
            texts = [tokenizer.token_text(token) for token in ids] if body.return_token_strs else None
            length = service.engine.max_context
            found = {"count": len(ids), "max_model_len": length, "tokens": ids, "token_strs": texts}
            return JSONResponse(found)

        return await service.call(answered)

    @router.post("/detokenize", responses=answer(DetokenizeAnswer))
    async def detokenize(body: DetokenizeBody) -> Response:
        """The text of token ids, special tokens included."""
        service.check_model(body.model)
        tokenizer = service.tokenizer

        def answered() -> Response:
            highest: int = tokenizer.highest_token_id
            if max(body.tokens, default=0) > highest:
                message = f"token id {max(body.tokens)} is no token's: the vocabulary ends with {highest}"
                raise RequestError(message, "tokens")
            return JSONResponse({"prompt": tokenizer.decode(body.tokens, skip_special_tokens=False)})

        return await service.call(answered)

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, str | None]:
        """Special tokens and chat template, for clients that render prompts themselves."""
        info: dict[str, str | None] = service.tokenizer.info()
        return info

    return router
