"""Comments in a stream while nothing comes: with the prompt's progress, and unseen by clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest
from running_server import RunningServer

from strata.engine.api import Progress, TokenSources
from strata.serve.sse import DONE, EventStreamResponse, KeepAlive, event

RUNNING = TokenSources(disk=4096, computed=7904)
BODY = {"prompt": "x", "stream": True}


def lines_of(served: RunningServer) -> list[str]:
    with served.http.stream("POST", "/v1/completions", json=BODY) as answer:
        return [line for line in answer.iter_lines() if line]


@pytest.mark.parametrize(
    ("progress", "comment"),
    [
        (Progress(12_000, 4_096, 8.2, RUNNING), ": prefill 4,096 of 12,000 tokens, about 8 s left"),
        (Progress(12_000, 4_096, None, RUNNING), ": prefill 4,096 of 12,000 tokens"),
        (Progress(12_000, 0, None), ": waiting to start a prompt of 12,000 tokens"),
        (Progress(12_000, 12_000, 0.0, RUNNING), ": generating"),
    ],
)
def test_silence_is_filled_with_progress(
    serve: Callable[..., RunningServer], progress: Progress, comment: str
) -> None:
    served = serve(sse_keepalive_s=0.05)
    served.engine.control.progress = progress
    served.engine.control.pieces, served.engine.control.delay_s = ("Hello",), 0.4
    lines = lines_of(served)
    assert lines[0] == comment and lines.count(comment) >= 2
    assert lines[-1] == "data: [DONE]" and all(line.startswith((":", "data: {", "data: [")) for line in lines)


def test_the_openai_client_sees_no_comment(serve: Callable[..., RunningServer]) -> None:
    served = serve(sse_keepalive_s=0.03)
    served.engine.control.delay_s = 0.2
    chat = served.openai.chat.completions.create(
        model="default", messages=[{"role": "user", "content": "x"}], stream=True
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chat) == "Hello, world"


def test_a_stream_that_never_pauses_has_no_comment_nor_one_that_turned_them_off(
    serve: Callable[..., RunningServer],
) -> None:
    assert not [line for line in lines_of(serve()) if line.startswith(":")]
    silent = serve(sse_keepalive_s=0)
    silent.engine.control.delay_s = 0.2
    assert not [line for line in lines_of(silent) if line.startswith(":")]


def send_with(events: AsyncGenerator[bytes, None], send: Callable[[dict[str, Any]], Any]) -> list[str]:
    """Runs a response against an ASGI server that is `send`; returns what was called at the end."""
    ended: list[str] = []

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        return {}

    async def run() -> None:
        keep_alive = KeepAlive(0.01, lambda: "alive")
        response = EventStreamResponse(events, lambda: ended.append("end"), keep_alive)
        await asyncio.wait_for(response({"type": "http"}, receive, send), 10)  # type: ignore[arg-type]

    asyncio.run(run())
    return ended


def test_a_comment_never_lands_inside_an_event_that_is_being_sent() -> None:
    sent: list[bytes] = []
    sending = 0

    async def send(message: dict[str, Any]) -> None:
        nonlocal sending
        if message["type"] == "http.response.body":
            sending += 1
            assert sending == 1, "two parts at once"
            await asyncio.sleep(0.05)  # a slow client
            sent.append(message["body"])
            sending -= 1

    async def events() -> AsyncGenerator[bytes, None]:
        for number in range(3):
            await asyncio.sleep(0.03)
            yield event({"number": number})
        yield DONE

    assert send_with(events(), send) == ["end"]
    assert [part for part in sent if part.startswith(b"data")] == [
        *(b'data: {"number":%d}\n\n' % number for number in range(3)),
        DONE,
    ]
    assert b": alive\n\n" in sent


def test_a_comment_that_cannot_be_sent_ends_the_answer() -> None:
    closed: list[str] = []

    async def send(message: dict[str, Any]) -> None:
        if message.get("body", b"").startswith(b":"):
            raise OSError("the client takes nothing any more")

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            await asyncio.sleep(60)
            yield DONE
        finally:
            closed.append("closed")

    with pytest.raises(OSError, match="takes nothing"):
        send_with(events(), send)
    assert closed == ["closed"]
