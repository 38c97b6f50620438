"""Streamed answers of an OpenAI-compatible server, with the time of every piece. Whatever goes wrong with a request
is part of its reply, in words; nothing is tried twice.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import httpx

from strata.errors import StrataError

COMPLETIONS = "completions"
CHAT = "chat"
_PATHS = {COMPLETIONS: "/v1/completions", CHAT: "/v1/chat/completions"}
_SOURCES = ("device", "host", "disk", "computed")
_CONNECT_TIMEOUT_S = 30.0
# Below the 5 s after which common servers close an idle connection: a request must not meet the closing.
_KEEP_ALIVE_S = 2.0
_WORDS_SHOWN = 300

Message = Mapping[str, str]


class _BrokenError(Exception):
    """The server's answer is no whole answer; the text says why."""


@dataclass
class Reply:
    """What came of one request. Times are `time.perf_counter`'s; `first_s` is None if no token came.

    `sources` are prompt tokens by where their KV came from: by tier from Strata, `cached` and `computed` from another
    server that tells, else empty. `error` is None for a whole answer.
    """

    sent_s: float
    first_s: float | None = None
    end_s: float = 0.0
    token_gaps_s: list[float] = field(default_factory=list)
    text: str = ""
    prompt_tokens: int | None = None
    output_tokens: int = 0
    sources: dict[str, int] = field(default_factory=dict)
    error: str | None = None


class OpenAIClient:
    """Asks one model of one server. Use it in the event loop that made it, as a context."""

    def __init__(self, url: str, model: str, timeout_s: float, ignore_eos: bool) -> None:
        self._model = model
        self._timeout_s = timeout_s
        self._extra: dict[str, Any] = {"ignore_eos": True} if ignore_eos else {}
        self.http = make_http(url, timeout_s)

    async def __aenter__(self) -> OpenAIClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.http.aclose()

    async def ask(self, endpoint: str, messages: Sequence[Message], max_tokens: int) -> Reply:
        """The streamed reply, greedy. A completion's prompt is the last message's content."""
        body = self._body(endpoint, messages, max_tokens)
        body |= {"stream": True, "stream_options": {"include_usage": True}, **self._extra}
        reply = Reply(time.perf_counter())
        try:
            await asyncio.wait_for(self._read(_PATHS[endpoint], body, reply), self._timeout_s)
        except asyncio.TimeoutError:
            reply.error = f"no whole answer within --request-timeout-s {self._timeout_s:g}"
        except _BrokenError as error:
            reply.error = str(error)
        except (httpx.HTTPError, httpx.StreamError) as error:
            reply.error = f"{type(error).__name__}: {error}"
        reply.end_s = time.perf_counter()
        return reply

    async def count_tokens(self, endpoint: str, text: str) -> int:
        """How many tokens the server makes of a text. Raises StrataError if it does not tell."""
        body = self._body(endpoint, [{"role": "user", "content": text}], 1)
        try:
            response = await self.http.post(_PATHS[endpoint], json=body)
            if response.status_code != httpx.codes.OK:
                raise StrataError(
                    f"the server answered {_PATHS[endpoint]} with {response.status_code}: {_words(response)}"
                )
            tokens = int(response.json()["usage"]["prompt_tokens"])
        except httpx.HTTPError as error:
            raise StrataError(
                f"the server broke off {_PATHS[endpoint]}: {type(error).__name__} {error}"
            ) from error
        except (ValueError, KeyError, TypeError) as error:
            raise StrataError(
                "the server does not tell how many tokens a prompt has (usage.prompt_tokens); give "
                "--characters-per-token, e.g. 4"
            ) from error
        return max(1, tokens)

    def _body(self, endpoint: str, messages: Sequence[Message], max_tokens: int) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self._model, "max_tokens": max_tokens, "temperature": 0}
        if endpoint == CHAT:
            return {**body, "messages": list(messages)}
        return {**body, "prompt": messages[-1]["content"]}

    async def _read(self, path: str, body: Mapping[str, Any], reply: Reply) -> None:
        """Fills the reply in. Raises _BrokenError or httpx' errors."""
        async with self.http.stream("POST", path, json=body) as response:
            if response.status_code != httpx.codes.OK:
                await response.aread()
                raise _BrokenError(f"status {response.status_code}: {_words(response)}")
            last = None
            async for line in response.aiter_lines():
                data = line.removeprefix("data:").strip()
                if data == "[DONE]":
                    return
                if line.startswith("data:"):
                    last = _take(data, reply, last)
        raise _BrokenError("the answer ended without [DONE]")


def make_http(url: str, timeout_s: float) -> httpx.AsyncClient:
    """Connections without end, straight to the server: a proxy of the environment would be measured too. The key in
    OPENAI_API_KEY goes with every request."""
    key = os.environ.get("OPENAI_API_KEY")
    return httpx.AsyncClient(
        base_url=url,
        headers={"Authorization": f"Bearer {key}"} if key else {},
        timeout=httpx.Timeout(timeout_s, connect=_CONNECT_TIMEOUT_S, pool=None),
        limits=httpx.Limits(max_connections=None, keepalive_expiry=_KEEP_ALIVE_S),
        trust_env=False,
    )


def _take(data: str, reply: Reply, last: float | None) -> float | None:
    """Adds one event to the reply; returns when the last piece of text came."""
    try:
        event = json.loads(data)
        if event.get("error"):
            raise _BrokenError(f"the answer ended with an error: {json.dumps(event['error'])[:_WORDS_SHOWN]}")
        shown = False
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            text = choice.get("text") or delta.get("content") or ""
            reply.text += text
            # A model that thinks first has begun to answer.
            shown = shown or bool(text or delta.get("reasoning_content") or choice.get("finish_reason"))
            if text or delta.get("reasoning_content"):
                now = time.perf_counter()
                reply.output_tokens += 1
                if last is not None:
                    reply.token_gaps_s.append(now - last)
                last = now
        if shown and reply.first_s is None:
            reply.first_s = time.perf_counter()
        if event.get("usage"):
            _take_usage(event["usage"], reply)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _BrokenError(
            f"the server sent an event that is none ({error}): {data[:_WORDS_SHOWN]}"
        ) from error
    return last


def _take_usage(usage: Mapping[str, Any], reply: Reply) -> None:
    """The server's own counts replace what was counted by pieces."""
    reply.prompt_tokens = int(usage["prompt_tokens"])
    reply.output_tokens = int(usage["completion_tokens"])
    tiers = usage.get("strata")
    if tiers:
        reply.sources = {source: int(tiers[source]) for source in _SOURCES}
        return
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    if cached is not None:
        reply.sources = {"cached": int(cached), "computed": reply.prompt_tokens - int(cached)}


def _words(response: httpx.Response) -> str:
    return response.text[:_WORDS_SHOWN].strip() or "no words"
