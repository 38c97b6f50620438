"""From a checked body to an answer: tokenise, check the length, submit, and hand the streams back whole or
in pieces.

Whatever happens on the way, every submitted stream is aborted if it has not ended. Completions and chats
differ only in their `Dialect`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from strata.engine.api import Chunk, GenerationRequest, RequestStream, TokenSources, Usage
from strata.errors import StrataError
from strata.serve import request_log
from strata.serve.disconnect import unless_client_leaves
from strata.serve.errors import ApiError, api_error_of
from strata.serve.protocol import GenerationBody
from strata.serve.service import Service
from strata.serve.sse import DONE, EventStreamResponse, event

_CLIENT_LEFT_STATUS = 499  # nobody reads it; it is what logs and metrics call such a request


@dataclass
class Answer:
    """One stream, as far as it was read."""

    text: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    usage: Usage | None = None

    def add(self, chunk: Chunk) -> None:
        """Takes the next chunk in."""
        self.text.append(chunk.text)
        self.finish_reason = chunk.finish_reason or self.finish_reason
        self.usage = chunk.usage or self.usage


class Dialect(Protocol):
    """How one of OpenAI's two protocols spells an answer."""

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The whole answer, without usage."""

    def piece(self, index: int, text: str, finish_reason: str | None, first: bool) -> dict[str, Any]:
        """One piece of a streamed answer; `first` for the first of its choice."""

    def frame(self) -> dict[str, Any]:
        """What every piece has beside its choices."""


Tokenize = Callable[[], list[list[int]]]
"""Gives a body's prompts as token ids. Runs in a worker thread; raises ApiError or StrataError."""


async def respond(
    service: Service,
    request: Request,
    body: GenerationBody,
    tokenize: Tokenize,
    default_max_tokens: int | None,
    dialect: Dialect,
) -> Response:
    """Answers one request, streamed or not. `default_max_tokens` None means the rest of the context."""
    streams = await service.call(_submit, service, body, tokenize, default_max_tokens)
    service.streams.update(streams)
    if body.stream:
        events = _events(service, streams, dialect, body.wants_usage_chunk)
        return EventStreamResponse(events, on_end=partial(_end, service, streams))
    try:
        stayed, answers = await unless_client_leaves(request.receive, _collect(service, streams))
    finally:
        _end(service, streams)
    if not stayed or answers is None:
        return Response(status_code=_CLIENT_LEFT_STATUS)
    return JSONResponse({**dialect.whole(answers), "usage": usage_body(answers)})


def _submit(
    service: Service, body: GenerationBody, tokenize: Tokenize, default_max_tokens: int | None
) -> list[RequestStream]:
    """Queues one request a prompt, all or none. Blocks; raises ApiError or StrataError."""
    service.check_model(body.model)
    body.refuse_unsupported()
    service.check_alive()
    requests = [_request(service, body, ids, default_max_tokens) for ids in tokenize()]
    streams: list[RequestStream] = []
    try:
        for request in requests:
            streams.append(service.engine.submit(request))
    except StrataError:
        _abort(streams)
        raise
    return streams


def _request(
    service: Service, body: GenerationBody, ids: list[int], default_max_tokens: int | None
) -> GenerationRequest:
    """Raises ApiError 400 for a prompt that is empty or does not fit: nothing is ever cut."""
    context = service.engine.max_context
    if not ids:
        raise ApiError(400, "the prompt is empty; send at least one token", "empty_prompt", body.prompt_field)
    if len(ids) >= context:
        raise ApiError(
            400,
            f"the prompt has {len(ids)} tokens, and the model's context of {context} tokens must hold it and "
            "at least one new token; shorten the prompt",
            "context_length_exceeded",
            body.prompt_field,
        )
    room = context - len(ids)
    limit = body.token_limit() or min(default_max_tokens or room, room)
    if limit > room:
        raise ApiError(
            400,
            f"the prompt has {len(ids)} tokens and max_tokens asks for {limit} more, together "
            f"{len(ids) + limit}; the model's context has {context}: shorten the prompt or lower max_tokens "
            f"to {room}",
            "context_length_exceeded",
            "max_tokens",
        )
    keep = body.cache_write is not False
    return GenerationRequest(ids, body.sampling(limit), body.cache_salt or "", body.priority or 0, keep)


async def _collect(service: Service, streams: Sequence[RequestStream]) -> list[Answer]:
    """Every stream to its end."""
    answers = [Answer() for _ in streams]
    async with aclosing(_pieces(service, streams)) as pieces:
        async for index, chunk in pieces:
            answers[index].add(chunk)
    return answers


async def _events(
    service: Service, streams: Sequence[RequestStream], dialect: Dialect, wants_usage_chunk: bool
) -> AsyncGenerator[bytes, None]:
    """The events of a streamed answer. An error after the start can only be an event itself."""
    answers = [Answer() for _ in streams]
    extra = {"usage": None} if wants_usage_chunk else {}
    try:
        async with aclosing(_pieces(service, streams)) as pieces:
            async for index, chunk in pieces:
                first = not answers[index].text
                if chunk.text or chunk.finish_reason:
                    answers[index].add(chunk)
                    yield event({**dialect.piece(index, chunk.text, chunk.finish_reason, first), **extra})
        if wants_usage_chunk:
            yield event({**dialect.frame(), "choices": [], "usage": usage_body(answers)})
    except StrataError as error:
        yield event(api_error_of(error).body())
    except ApiError as error:
        yield event(error.body())
    yield DONE


async def _pieces(
    service: Service, streams: Sequence[RequestStream]
) -> AsyncGenerator[tuple[int, Chunk], None]:
    """(index, chunk) of all streams as they come. Aborts what has not ended when it is closed or fails.

    Raises ApiError 503 when the engine, not the client, ended a request early: half an answer must not look
    whole.
    """
    iterators = [stream.__aiter__() for stream in streams]
    waiting = {asyncio.ensure_future(_next(iterator)): index for index, iterator in enumerate(iterators)}
    pieces = 0
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                index = waiting.pop(task)
                chunk = task.result()
                if chunk.finish_reason is None:
                    waiting[asyncio.ensure_future(_next(iterators[index]))] = index
                else:
                    _finished(service, chunk)
                pieces += 1
                yield index, chunk
    except (asyncio.CancelledError, GeneratorExit):
        service.metrics.cut.inc()
        request_log.log_cut(pieces)
        raise
    finally:
        _abort(streams)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def _next(iterator: AsyncIterator[Chunk]) -> Chunk:
    chunk = await anext(iterator, None)
    if chunk is None:
        raise ApiError(500, "the engine ended a stream without a finish reason", "stream_cut")
    return chunk


def _finished(service: Service, chunk: Chunk) -> None:
    if chunk.usage is not None and chunk.finish_reason is not None:
        service.metrics.observe(chunk.usage, chunk.finish_reason)
        request_log.log_finished(chunk.usage)
    if chunk.finish_reason == "abort":
        raise ApiError(
            503, "the server stopped this request before its answer was complete; send it again", "aborted"
        )


def _end(service: Service, streams: Sequence[RequestStream]) -> None:
    _abort(streams)
    service.streams.difference_update(streams)


def _abort(streams: Sequence[RequestStream]) -> None:
    """Idempotent, so also for streams that ended."""
    for stream in streams:
        stream.abort()


def usage_body(answers: Sequence[Answer]) -> dict[str, Any]:
    """OpenAI's usage object, with the tiers that the prompt tokens came from under `strata`.

    Tokens and saved seconds are sums over the prompts; `ttft_s` is the longest.
    """
    usages = [answer.usage for answer in answers if answer.usage is not None]
    sources = TokenSources(
        device=sum(usage.sources.device for usage in usages),
        host=sum(usage.sources.host for usage in usages),
        disk=sum(usage.sources.disk for usage in usages),
        computed=sum(usage.sources.computed for usage in usages),
    )
    prompt_tokens = sum(usage.prompt_tokens for usage in usages)
    completion_tokens = sum(usage.completion_tokens for usage in usages)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sources.cached},
        "strata": {
            "device": sources.device,
            "host": sources.host,
            "disk": sources.disk,
            "computed": sources.computed,
            "ttft_s": round(max((usage.ttft_s for usage in usages), default=0.0), 6),
            "saved_s": round(sum(usage.saved_s for usage in usages), 6),
        },
    }
