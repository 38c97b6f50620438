"""Many clients that ask one server for minutes, some of which leave in the middle of their answer.

Each client asks again as soon as it has been answered, about one of a few documents. What it may be told is an answer
that ends as it should, or with 429 or 503 to come again, and when; everything else is a failure, in words.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import httpx

from strata.bench.load.schedule import Block

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
_ANSWER_TIMEOUT_S = 600.0
_RETRY_STATUSES = (429, 503)
_WORDS_SHOWN = 200
_LONGEST_WAIT_S = 5.0


@dataclass(frozen=True)
class Plan:
    """What is asked. `leave` is the part of the requests whose client leaves; `characters` those of a document."""

    clients: int
    seconds: float
    leave: float
    documents: int
    characters: int
    max_tokens: int
    seed: int


@dataclass
class Tally:
    """What became of all requests: `whole`, `left`, `told to come again`, and failures by their words."""

    outcomes: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    cached_tokens: int = 0
    prompt_tokens: int = 0


class _FailedError(Exception):
    """An answer that is none; the text says why."""


class _ToldToWaitError(Exception):
    """429 or 503 with Retry-After."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"come again in {seconds:g} s")
        self.seconds = seconds


async def soak(http: httpx.AsyncClient, plan: Plan) -> Tally:
    """Runs all clients until the time is over and each has ended its last request."""
    tally = Tally()
    end = time.monotonic() + plan.seconds
    await asyncio.gather(*(_client(http, plan, number, end, tally) for number in range(plan.clients)))
    return tally


async def _client(http: httpx.AsyncClient, plan: Plan, number: int, end: float, tally: Tally) -> None:
    draw = random.Random(f"{plan.seed} {number}")
    # They do not all come in the same moment.
    await asyncio.sleep(draw.random())
    count = 0
    while time.monotonic() < end:
        count += 1
        try:
            path, body = _request(plan, draw, f"{number}.{count}")
            leaves = draw.random() < plan.leave
            events = draw.randrange(plan.max_tokens) if leaves and "stream" in body else None
            # What comes at once has no middle to leave in: who does not wait for it goes after a moment.
            patience_s = draw.random() if leaves and "stream" not in body else None
            tally.outcomes[await _ask(http, path, body, events, patience_s, tally)] += 1
        except _ToldToWaitError as told:
            tally.outcomes["told to come again"] += 1
            await asyncio.sleep(min(told.seconds, _LONGEST_WAIT_S) * (1 + draw.random()))
        except _FailedError as error:
            tally.failures[str(error)] += 1
        except (httpx.HTTPError, asyncio.TimeoutError, ValueError, KeyError) as error:
            tally.failures[f"{type(error).__name__}: {error}"[:_WORDS_SHOWN]] += 1


def _request(plan: Plan, draw: random.Random, name: str) -> tuple[str, dict[str, Any]]:
    """A question about a document, as completion or chat, streamed or whole, now and then of another tenant."""
    key = f"soak {draw.randrange(plan.documents)}"
    text = f"{Block(key, plan.characters, plan.characters)}\n\nQuestion {name}: what is this about?\nAnswer:"
    body: dict[str, Any] = {
        "max_tokens": 1 + draw.randrange(plan.max_tokens),
        "temperature": draw.choice((0.0, 1.0)),
        "ignore_eos": True,
        "cache_salt": draw.choice(("", "", "", "tenant")),
    }
    if draw.random() < 0.7:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if draw.random() < 0.3:
        return CHAT, body | {"messages": [{"role": "user", "content": text}]}
    return COMPLETIONS, body | {"prompt": text}


async def _ask(
    http: httpx.AsyncClient,
    path: str,
    body: dict[str, Any],
    leaves_after: int | None,
    patience_s: float | None,
    tally: Tally,
) -> str:
    """How it ended: `whole`, or `left` after so many events or seconds. Raises _FailedError, _ToldToWaitError or httpx'
    errors."""
    reading = _read(http, path, body, leaves_after)
    try:
        usage = await asyncio.wait_for(reading, _ANSWER_TIMEOUT_S if patience_s is None else patience_s)
    except asyncio.TimeoutError:
        if patience_s is None:
            raise
        return "left"
    if usage is None:
        return "left"
    _count(usage, tally)
    return "whole"


async def _read(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], leaves_after: int | None
) -> dict[str, Any] | None:
    """The usage of an answer that was read to its end, None if it was left."""
    events = 0
    usage: dict[str, Any] | None = None
    reason: str | None = None
    async with aclosing(_objects(http, path, body)) as objects:
        async for event in objects:
            if leaves_after is not None and events >= leaves_after:
                return None
            events += 1
            if event.get("error"):
                raise _FailedError(f"an answer ended with an error: {event['error']}"[:_WORDS_SHOWN])
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                reason = choice.get("finish_reason") or reason
    if reason is None or usage is None:
        raise _FailedError("an answer ended without a finish reason or its usage")
    return usage


async def _objects(
    http: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> AsyncGenerator[dict[str, Any], None]:
    """The JSON objects of an answer: those of its stream, up to [DONE], or the one that it is."""
    async with http.stream("POST", path, json=body) as response:
        await _check(response)
        if not body.get("stream"):
            yield json.loads(await response.aread())
            return
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                return
            if line.startswith("data:"):
                yield json.loads(line[5:])
    raise _FailedError("an answer ended without [DONE]")


async def _check(response: httpx.Response) -> None:
    """Raises unless it is 200."""
    if response.status_code == httpx.codes.OK:
        return
    await response.aread()
    if response.status_code in _RETRY_STATUSES and "retry-after" in response.headers:
        raise _ToldToWaitError(float(response.headers["retry-after"]))
    raise _FailedError(f"status {response.status_code}: {response.text}"[:_WORDS_SHOWN])


def _count(usage: dict[str, Any], tally: Tally) -> None:
    sources = usage["strata"]
    counted = sum(int(sources[name]) for name in ("device", "host", "disk", "computed"))
    if counted != usage["prompt_tokens"]:
        raise _FailedError(f"{counted} prompt tokens by source, and {usage['prompt_tokens']} in all")
    tally.prompt_tokens += counted
    tally.cached_tokens += counted - int(sources["computed"])


@dataclass(frozen=True)
class Look:
    """The server's process at one moment."""

    at_s: float
    resident_bytes: int
    open_sockets: int
    threads: int


def growth(looks: Sequence[Look]) -> float:
    """Bytes of memory by which the last quarter's median is above that of the second quarter; the first is for tiers
    and pools to fill."""
    quarter = max(1, len(looks) // 4)
    return _median(looks[-quarter:]) - _median(looks[quarter : 2 * quarter] or looks[:quarter])


def _median(looks: Sequence[Look]) -> float:
    values = sorted(look.resident_bytes for look in looks)
    return float(values[len(values) // 2])
