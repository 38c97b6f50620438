"""A small OpenAI server over real HTTP that does as a test tells it, and remembers what it was asked."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

CHARACTERS_PER_TOKEN = 5


def event(body: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(body).encode() + b"\n\n"


@dataclass
class FakeOpenAIServer:
    """Answers `max_tokens` words. `held` keeps answers back after their first event, which has no text, until it is
    cleared; `faults` says what goes wrong with the requests in order, e.g. `status`, `error`, `cut`, `garbage`.
    """

    faults: list[str] = field(default_factory=list)
    cached_tokens: int | None = None
    models: tuple[str, ...] = ("fake",)
    max_model_len: int | None = None
    owner: str = "tests"
    tells_usage: bool = True
    held: threading.Event = field(default_factory=threading.Event)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    first_text_s: list[float] = field(default_factory=list)
    in_flight: int = 0
    peak: int = 0

    def __post_init__(self) -> None:
        routes = [
            Route("/v1/models", self._models),
            Route("/v1/completions", self._answer, methods=["POST"]),
            Route("/v1/chat/completions", self._answer, methods=["POST"]),
        ]
        self._server = uvicorn.Server(
            uvicorn.Config(Starlette(routes=routes), port=0, log_config=None, lifespan="off")
        )
        self._thread = threading.Thread(target=self._server.run)

    def __enter__(self) -> FakeOpenAIServer:
        self._thread.start()
        deadline = time.monotonic() + 10
        while not self._server.started:
            assert time.monotonic() < deadline, "the fake server did not start"
            time.sleep(0.005)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        return self

    def __exit__(self, *_: object) -> None:
        self.held.clear()
        self._server.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive()

    @property
    def streamed(self) -> list[dict[str, Any]]:
        """The bodies of the load; others count tokens."""
        return [body for body in self.bodies if body.get("stream")]

    async def _models(self, request: Request) -> Response:
        cards = [
            {"id": name, "owned_by": self.owner, "max_model_len": self.max_model_len} for name in self.models
        ]
        return JSONResponse({"object": "list", "data": cards})

    async def _answer(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        chat = "messages" in body
        texts = [message["content"] for message in body["messages"]] if chat else [body["prompt"]]
        usage: dict[str, Any] = {
            "prompt_tokens": sum(map(len, texts)) // CHARACTERS_PER_TOKEN,
            "completion_tokens": body["max_tokens"],
        }
        if self.cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens}
        if not body.get("stream"):
            return JSONResponse({"choices": [], "usage": usage} if self.tells_usage else {"choices": []})
        fault = self.faults.pop(0) if self.faults else ""
        if fault == "status":
            return JSONResponse({"error": {"message": "no room on the moon"}}, 503)
        return StreamingResponse(self._events(body, chat, usage, fault), media_type="text/event-stream")

    async def _events(
        self, body: dict[str, Any], chat: bool, usage: dict[str, Any], fault: str
    ) -> AsyncIterator[bytes]:
        def piece(text: str, reason: str | None = None) -> bytes:
            told = {"delta": {"content": text}} if chat else {"text": text}
            return event({"choices": [{"index": 0, "finish_reason": reason, **told}]})

        self.in_flight += 1
        self.peak = max(self.peak, self.in_flight)
        try:
            yield piece("")
            while self.held.is_set():
                await asyncio.sleep(0.005)
            self.first_text_s.append(time.perf_counter())
            yield piece("word0")
            if fault == "error":
                yield event({"error": {"message": "the moon fell down"}})
            if fault == "garbage":
                yield b"data: {no json\n\n"
            for number in range(1, body["max_tokens"]):
                yield piece(f" word{number}")
            yield piece("", "length")
            if self.tells_usage:
                yield event({"choices": [], "usage": usage})
            if fault != "cut":
                yield b"data: [DONE]\n\n"
        finally:
            self.in_flight -= 1
