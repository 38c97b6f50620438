"""Server-sent events: one `data:` line an event, `[DONE]` last, ended at once when the client leaves.

A slow client makes its own `send` wait and nothing else. While nothing comes, comment lines say how far the prompt is:
clients pass over them, and proxies and read timeouts see that the answer is alive.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from strata.engine.api import RequestStream
from strata.serve.disconnect import unless_client_leaves

DONE = b"data: [DONE]\n\n"
_LINE_ENDS = {"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"}
"""What ends a line for Python's `splitlines` and httpx's `iter_lines`, and stands in JSON unescaped."""


def event(body: dict[str, Any]) -> bytes:
    """One event with a JSON object, in one line however a client takes lines apart."""
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    for character, escaped in _LINE_ENDS.items():
        text = text.replace(character, escaped)
    return b"data: " + text.encode() + b"\n\n"


@dataclass(frozen=True)
class KeepAlive:
    """After each `every_s` seconds without an event, the text of `comment` is sent as a comment; 0: never."""

    every_s: float
    comment: Callable[[], str]


def progress_comment(streams: Sequence[RequestStream]) -> str:
    """E.g. `prefill 4,096 of 12,000 tokens, about 8 s left`; sums over several prompts, and the longest time."""
    every = [stream.progress() for stream in streams]
    whole, done = sum(each.prompt_tokens for each in every), sum(each.done_tokens for each in every)
    if done == whole:
        return "generating"
    if all(each.sources is None for each in every):
        return f"waiting to start a prompt of {whole:,} tokens"
    times = [each.remaining_s for each in every]
    known = [seconds for seconds in times if seconds is not None]
    left = f", about {max(known):,.0f} s left" if len(known) == len(times) else ""
    return f"prefill {done:,} of {whole:,} tokens{left}"


class EventStreamResponse(Response):
    """Sends what a generator of events yields. `on_end` is called in every case, also if nothing was ever
    sent."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        on_end: Callable[[], None],
        keep_alive: KeepAlive | None = None,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.body = b""
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._on_end = on_end
        self._keep_alive = keep_alive
        self._sending = asyncio.Lock()
        """Held while a part is being sent: a comment must not land inside an event."""
        self._sent = 0.0
        self._ended = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_client_leaves(receive, self._send_all(send))
        finally:
            self._on_end()

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._events):
            await send(
                {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            )
            self._sent = time.monotonic()
            if self._keep_alive is None or not self._keep_alive.every_s:
                await self._send_events(send)
            else:
                await self._send_with_comments(send, self._keep_alive)

    async def _send_events(self, send: Send) -> None:
        async for data in self._events:
            async with self._sending:
                await self._send_part(send, data)
        async with self._sending:
            self._ended = True
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_with_comments(self, send: Send, keep_alive: KeepAlive) -> None:
        events = asyncio.ensure_future(self._send_events(send))
        comments = asyncio.ensure_future(self._send_comments(send, keep_alive))
        try:
            await asyncio.wait({events, comments}, return_when=asyncio.FIRST_COMPLETED)
            # Comments have no end of their own: they ended before the events because they cannot be sent.
            (events if events.done() else comments).result()
        finally:
            events.cancel()
            comments.cancel()
            await asyncio.gather(events, comments, return_exceptions=True)

    async def _send_comments(self, send: Send, keep_alive: KeepAlive) -> None:
        while True:
            async with self._sending:
                left = self._sent + keep_alive.every_s - time.monotonic()
                if left <= 0:
                    left = keep_alive.every_s
                    if not self._ended:
                        # The empty line ends the comment for clients that take a stream apart at empty lines.
                        await self._send_part(send, f": {keep_alive.comment()}\n\n".encode())
            await asyncio.sleep(left)

    async def _send_part(self, send: Send, data: bytes) -> None:
        await send({"type": "http.response.body", "body": data, "more_body": True})
        self._sent = time.monotonic()
