"""From a checked body to an answer: tokenise, check the length, submit, and hand the streams back whole or
in pieces.

Whatever happens on the way, every submitted stream is aborted if it has not ended. Completions and chats
differ only in their `Dialect`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from strata.engine.api import (
    MOST_PROMPT_LOGPROBS,
    Chunk,
    GenerationRequest,
    RequestStream,
    SamplingParams,
    TokenLogprob,
    Usage,
)
from strata.errors import StrataError
from strata.serve import request_log
from strata.serve.auth import salt_of
from strata.serve.disconnect import unless_client_leaves
from strata.serve.errors import ApiError, api_error_of
from strata.serve.protocol import GenerationBody
from strata.serve.service import Service
from strata.serve.sse import DONE, EventStreamResponse, KeepAlive, event, progress_comment
from strata.serve.usage import tokens_so_far, usage_body

_CLIENT_LEFT_STATUS = 499  # nobody reads it; it is what logs and metrics call such a request


@dataclass(eq=False)
class Answer:
    """One choice: its prompt, its stream, and what was read of it. `silent` ones show their prompt alone."""

    index: int
    prompt: Sequence[int]
    stream: RequestStream
    max_tokens: int
    first: Answer | None = None
    """The first choice of the same prompt, if this is another one: it has the prompt's log probabilities for all."""
    silent: bool = False
    scored: bool = False
    """Whether its stream brings the prompt's log probabilities."""
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    own_prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    finish_reason: str | None = None
    stopped_by: str | int | None = None
    usage: Usage | None = None
    ids_shown: int | None = None
    """How many of its token ids `take_ids` has given; None before the first time."""

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprob | None, ...]:
        """Of the prompt's tokens, if they were asked for and have come."""
        return (self.first or self).own_prompt_logprobs

    def add(self, chunk: Chunk) -> None:
        """Takes the next chunk in."""
        self.own_prompt_logprobs = chunk.prompt_logprobs or self.own_prompt_logprobs
        self.finish_reason = chunk.finish_reason or self.finish_reason
        self.stopped_by = chunk.stopped_by
        self.usage = chunk.usage or self.usage
        if self.silent:
            # The engine had to make one token, which nobody asked for, whatever that token says.
            self.finish_reason, self.stopped_by = self.finish_reason and "length", None
            self.usage = self.usage and replace(self.usage, completion_tokens=0)
            return
        self.text.append(chunk.text)
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs

    def take_ids(self) -> dict[str, list[int]]:
        """What `return_token_ids` adds: the tokens since the last time, and the first time those of the prompt."""
        prompt = {"prompt_token_ids": list(self.prompt)} if self.ids_shown is None else {}
        new = self.token_ids[self.ids_shown or 0 :]
        self.ids_shown = len(self.token_ids)
        return {"token_ids": new, **prompt}


class Dialect(Protocol):
    """How one of OpenAI's two protocols spells an answer."""

    def whole(self, answer: Answer) -> dict[str, Any]:
        """One choice, all of it."""

    def piece(self, answer: Answer, chunk: Chunk) -> dict[str, Any] | None:
        """What a chunk that `answer` has just taken in adds to its streamed choice; None if that is nothing yet."""

    def frame(self) -> dict[str, Any]:
        """What every object of an answer has beside its choices."""


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
    """Answers one request, streamed or not. `default_max_tokens` None means what the model's makers
    want, or else the rest of the context."""
    body.cache_salt = salt_of(request.scope, service.config.server, body.cache_salt or "")
    answers = await service.call(_submit, service, body, tokenize, default_max_tokens)
    streams = [answer.stream for answer in answers]
    service.streams.update(streams)
    if body.stream:
        events = _events(service, answers, dialect, body)
        keep_alive = KeepAlive(service.config.server.sse_keepalive_s, partial(progress_comment, streams))
        return EventStreamResponse(events, partial(_end, service, streams), keep_alive)
    try:
        stayed, _ = await unless_client_leaves(request.receive, _collect(service, answers))
    finally:
        _end(service, streams)
    if not stayed:
        return Response(status_code=_CLIENT_LEFT_STATUS)
    if body.is_large():
        # This is work of its own, and the event loop must go on for all others.
        return await service.call(_whole, dialect, answers)
    return _whole(dialect, answers)


def _whole(dialect: Dialect, answers: Sequence[Answer]) -> Response:
    choices = [dialect.whole(answer) for answer in answers]
    return JSONResponse({**dialect.frame(), "choices": choices, "usage": usage_of(answers)})


def _submit(
    service: Service, body: GenerationBody, tokenize: Tokenize, default_max_tokens: int | None
) -> list[Answer]:
    """Queues `n` requests a prompt, all or none. Blocks; raises ApiError or StrataError."""
    service.check_model(body.model)
    body.refuse_unsupported()
    service.check_alive()
    # Before anything is done for any of them.
    _check_choices(service, body.prompt_count() * body.choices())
    defaults = service.engine.sampling_defaults
    _fill_in(body, defaults)
    sampling = body.sampling()
    prompts = tokenize()
    _check_prompt_logprobs(sampling, sum(map(len, prompts)))
    longest = default_max_tokens or int(defaults.get("max_tokens", 0)) or None
    requests = [_request(service, body, sampling, ids, longest) for ids in prompts]
    silent = body.token_limit() == 0
    answers: list[Answer] = []
    try:
        for request in requests:
            first = None
            for number in range(body.choices()):
                stream = service.observer.submit(_choice(request, number))
                scored = first is None and sampling.prompt_logprobs is not None
                most = request.sampling.max_tokens
                answers.append(
                    Answer(len(answers), request.prompt_token_ids, stream, most, first, silent, scored)
                )
                first = first or answers[-1]
    except BaseException:
        _abort([answer.stream for answer in answers])
        raise
    return answers


def _fill_in(body: GenerationBody, defaults: Mapping[str, float]) -> None:
    """What the request leaves out of how to sample is as the model's makers want it."""
    for name, value in defaults.items():
        if name != "max_tokens" and getattr(body, name) is None:
            setattr(body, name, value)


def _check_choices(service: Service, choices: int) -> None:
    """Raises ApiError 400 for more than can ever be under way: to say "later" would be untrue."""
    most = service.config.scheduler.max_running + service.config.scheduler.max_waiting
    if choices > most:
        raise ApiError(
            400,
            f"the request asks for {choices} answers (prompts times n), and at most {most} can run or wait "
            "(--max-running + --max-waiting); send fewer prompts in one request",
            "too_many_choices",
            "prompt",
        )


def _check_prompt_logprobs(sampling: SamplingParams, tokens: int) -> None:
    """Raises ApiError 400 for more than a body's prompts may have together."""
    if (
        sampling.prompt_logprobs is not None
        and tokens * (1 + sampling.prompt_logprobs) > MOST_PROMPT_LOGPROBS
    ):
        raise ApiError(
            400,
            f"echo with logprobs asks for {1 + sampling.prompt_logprobs} log probabilities of each of {tokens} prompt "
            f"tokens, and at most {MOST_PROMPT_LOGPROBS} are given in one answer; send less, or lower logprobs",
            "too_many_logprobs",
            "logprobs",
        )


def _choice(request: GenerationRequest, number: int) -> GenerationRequest:
    """A prompt's choices differ, with a seed too; its log probabilities are computed for the first alone."""
    if number == 0:
        return request
    sampling = request.sampling
    seed = None if sampling.seed is None else sampling.seed + number
    return replace(request, sampling=replace(sampling, seed=seed, prompt_logprobs=None))


def _request(
    service: Service,
    body: GenerationBody,
    sampling: SamplingParams,
    ids: list[int],
    default_max_tokens: int | None,
) -> GenerationRequest:
    """Raises ApiError 400 for a prompt that is empty or does not fit: nothing is ever cut."""
    context = service.engine.context
    if not ids:
        raise ApiError(400, "the prompt is empty; send at least one token", "empty_prompt", body.prompt_field)
    if len(ids) >= context.tokens:
        raise ApiError(
            400,
            f"the prompt has {len(ids)} tokens, and {context.name} must hold it and at least one new "
            f"token; shorten the prompt{context.or_more}",
            "context_length_exceeded",
            body.prompt_field,
        )
    room = context.tokens - len(ids)
    asked = body.token_limit()
    limit = min(default_max_tokens or room, room) if asked is None else max(asked, 1)
    if limit > room:
        raise ApiError(
            400,
            f"the prompt has {len(ids)} tokens and max_tokens asks for {limit} more, together "
            f"{len(ids) + limit}; that is more than {context.name}: shorten the prompt or lower max_tokens to "
            f"{room}{context.or_more}",
            "context_length_exceeded",
            "max_tokens",
        )
    if sampling.min_tokens > limit:
        message = f"min_tokens {sampling.min_tokens} is more than max_tokens {limit}; lower it"
        raise ApiError(400, message, "invalid_value", "min_tokens")
    keep = body.cache_write is not False
    sampling = replace(sampling, max_tokens=limit)
    # Over HTTP lower goes first, as vLLM has it; in the engine higher does.
    return GenerationRequest(
        ids, sampling, body.cache_salt or "", -(body.priority or 0), keep, body.continues_text
    )


async def _collect(service: Service, answers: Sequence[Answer]) -> None:
    """Every stream to its end."""
    async with aclosing(_pieces(service, answers)) as pieces:
        async for answer, chunk in pieces:
            answer.add(chunk)


async def _events(
    service: Service, answers: Sequence[Answer], dialect: Dialect, body: GenerationBody
) -> AsyncGenerator[bytes, None]:
    """The events of a streamed answer. An error after the start can only be an event itself."""
    extra: dict[str, Any] = {"usage": None} if body.wants_usage_chunk else {}
    beginning = set(answers) if body.is_large() else set()
    try:
        async with aclosing(_pieces(service, answers)) as pieces:
            async for answer, chunk in pieces:
                answer.add(chunk)
                if body.wants_running_usage:
                    extra = {"usage": tokens_so_far(len(answer.prompt), len(answer.token_ids))}
                if answer in beginning:
                    # A prompt that is shown may be long, and the event loop must go on for all others.
                    beginning.remove(answer)
                    piece = await service.call(_piece, dialect, answer, chunk, extra)
                else:
                    piece = _piece(dialect, answer, chunk, extra)
                if piece is not None:
                    yield piece
        if body.wants_usage_chunk:
            yield event({**dialect.frame(), "choices": [], "usage": usage_of(answers)})
    except StrataError as error:
        yield event(api_error_of(error).body())
    except ApiError as error:
        yield event(error.body())
    yield DONE


def _piece(dialect: Dialect, answer: Answer, chunk: Chunk, extra: dict[str, Any]) -> bytes | None:
    choice = dialect.piece(answer, chunk)
    return None if choice is None else event({**dialect.frame(), "choices": [choice], **extra})


async def _pieces(service: Service, answers: Sequence[Answer]) -> AsyncGenerator[tuple[Answer, Chunk], None]:
    """(answer, chunk) of all streams as they come. Aborts what has not ended when it is closed or fails.

    Raises ApiError 503 when the engine, not the client, ended a request early: half an answer must not look
    whole.
    """
    pieces = 0
    try:
        async with aclosing(_one(answers[0]) if len(answers) == 1 else _several(answers)) as chunks:
            async for answer, chunk in chunks:
                if chunk.finish_reason is not None:
                    _finished(service, answer, chunk)
                pieces += 1
                yield answer, chunk
        for counts in _answer_tokens(answers):
            service.metrics.requests.observe_prompt(counts)
    except (asyncio.CancelledError, GeneratorExit):
        service.metrics.cut.inc()
        request_log.log_cut(pieces)
        raise
    finally:
        _abort([answer.stream for answer in answers])


async def _one(answer: Answer) -> AsyncGenerator[tuple[Answer, Chunk], None]:
    """The chunks of one stream, without a task for each: most requests have one."""
    iterator = answer.stream.__aiter__()
    while True:
        chunk = await _next(iterator)
        yield answer, chunk
        if chunk.finish_reason is not None:
            return


async def _several(answers: Sequence[Answer]) -> AsyncGenerator[tuple[Answer, Chunk], None]:
    """The chunks of several streams, each as soon as it is there; but where a prompt's log probabilities are shown,
    its other choices begin after the one that has them."""
    iterators = [answer.stream.__aiter__() for answer in answers]
    waiting: dict[asyncio.Future[Chunk], int] = {}

    def await_next(index: int) -> None:
        waiting[asyncio.ensure_future(_next(iterators[index]))] = index

    held = {answer.index: answer.first for answer in answers if answer.first and answer.first.scored}
    try:
        for answer in answers:
            if answer.index not in held:
                await_next(answer.index)
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                index = waiting.pop(task)
                chunk = task.result()
                if chunk.finish_reason is None:
                    await_next(index)
                yield answers[index], chunk
                for other in [other for other, first in held.items() if first is answers[index]]:
                    del held[other]
                    await_next(other)
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def _next(iterator: AsyncIterator[Chunk]) -> Chunk:
    chunk = await anext(iterator, None)
    if chunk is None:
        raise ApiError(500, "the engine ended a stream without a finish reason", "stream_cut")
    return chunk


def _answer_tokens(answers: Sequence[Answer]) -> Collection[list[int]]:
    """How many tokens each answer has, for each prompt."""
    counts: dict[Answer, list[int]] = {}
    for answer in answers:
        counts.setdefault(answer.first or answer, []).append(len(answer.token_ids))
    return counts.values()


def _finished(service: Service, answer: Answer, chunk: Chunk) -> None:
    if chunk.usage is not None and chunk.finish_reason is not None:
        service.metrics.observe(chunk.usage, chunk.finish_reason, answer.max_tokens)
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


def usage_of(answers: Sequence[Answer]) -> dict[str, Any]:
    """`usage` of a whole answer: each prompt counts once, however many choices it has."""
    return usage_body(
        [answer.usage for answer in answers if answer.usage is not None and answer.first is None],
        [answer.usage for answer in answers if answer.usage is not None],
    )
