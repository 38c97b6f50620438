"""Requests that are sent when due: never more at once than the limit, every time from the right moment, every failure
with its words. Against a fake server over real HTTP; order and counts decide, never how long something took."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from fake_openai_server import CHARACTERS_PER_TOKEN, FakeOpenAIServer

from strata.bench.load.client import CHAT, COMPLETIONS, OpenAIClient
from strata.bench.load.measures import across_seeds, failures_of, figures_of, record_as_json
from strata.bench.load.runner import Run, Runner
from strata.bench.load.schedule import Session, Turn


def single(topic: int, arrival_s: float = 0.0, tokens: int = 3) -> Session:
    return Session(topic, arrival_s, (Turn((f"prompt {topic}",), tokens),))


def run_load(
    server: FakeOpenAIServer,
    sessions: list[Session],
    limit: int = 128,
    endpoint: str = COMPLETIONS,
    timeout_s: float = 60.0,
    beside: Callable[[], Coroutine[Any, Any, None]] | None = None,
) -> Run:
    async def run() -> Run:
        async with OpenAIClient(server.url, "fake", timeout_s, ignore_eos=True) as client:
            runner = Runner(client, endpoint, limit, lambda: None)
            other = asyncio.ensure_future(beside()) if beside else None
            done = await runner.run(sessions)
            if other is not None:
                await other
            return done

    return asyncio.run(run())


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come about"
        await asyncio.sleep(0.005)


def sessions_begun() -> int:
    """Sessions that this loop has a task for."""
    coroutines = [task.get_coro() for task in asyncio.all_tasks()]
    return sum("_session" in getattr(coroutine, "__qualname__", "") for coroutine in coroutines)


def test_no_more_than_the_limit_are_in_flight_and_the_others_wait_in_order() -> None:
    with FakeOpenAIServer() as server:
        server.held.set()
        released: list[float] = []

        async def release() -> None:
            await until(lambda: server.in_flight == 4 and sessions_begun() == 12)
            for _ in range(3):
                await asyncio.sleep(0)
            released.append(time.perf_counter())
            server.held.clear()

        run = run_load(server, [single(number) for number in range(12)], limit=4, beside=release)
    assert server.peak == run.most_in_flight == 4
    limited = [record for record in run.records if record.limited]
    assert sorted(record.topic for record in limited) == [*range(4, 12)]
    assert [record.topic for record in sorted(limited, key=lambda record: record.sent_s)] == [*range(4, 12)]
    for record in run.records:
        found = record_as_json(record)
        waited = found["ttft_s"] - found["ttft_sent_s"]
        assert waited == pytest.approx(record.sent_s - record.due_s)
        if record.limited:
            assert record.reply.sent_s >= released[0], (
                "what waits on the client is in TTFT from arrival alone"
            )
    figures = figures_of(run)
    assert figures["limited"] == 8 and figures["requests"] == 12 and figures["failed"] == 0
    assert figures["ttft_s_p90"] > figures["ttft_sent_s_p90"]


@pytest.mark.parametrize("endpoint", [COMPLETIONS, CHAT])
def test_the_first_token_is_the_first_text(endpoint: str) -> None:
    with FakeOpenAIServer(cached_tokens=1) as server:
        server.held.set()

        async def release() -> None:
            await until(lambda: server.in_flight == 1)
            server.held.clear()

        run = run_load(server, [single(0, tokens=4)], endpoint=endpoint, beside=release)
        (record,) = run.records
        assert record.reply.first_s is not None
        assert record.reply.sent_s < server.first_text_s[0] <= record.reply.first_s <= record.reply.end_s
        assert record.reply.text == "word0 word1 word2 word3"
        assert len(record.reply.token_gaps_s) == 3 and record.reply.output_tokens == 4
        assert record.reply.sources == {"cached": 1, "computed": len("prompt 0") // CHARACTERS_PER_TOKEN - 1}
        (body,) = server.bodies
        assert body["stream_options"] == {"include_usage": True} and body["ignore_eos"] is True
        assert body["temperature"] == 0 and body["model"] == "fake"


def test_requests_are_sent_when_due_however_long_answers_take() -> None:
    with FakeOpenAIServer() as server:
        server.held.set()

        async def release() -> None:
            await until(lambda: server.in_flight == 5)
            server.held.clear()

        run = run_load(server, [single(number, number * 0.01) for number in range(5)], beside=release)
    assert not any(record.limited for record in run.records)
    assert all(record.sent_s >= record.due_s for record in run.records)
    assert sorted(record.due_s for record in run.records) == pytest.approx([0, 0.01, 0.02, 0.03, 0.04])


def test_a_chat_resends_its_history_with_the_servers_answers() -> None:
    turns = tuple(Turn((f"say {number}",), 2, think_s=0.01 * number) for number in range(3))
    with FakeOpenAIServer() as server:
        run = run_load(server, [Session(0, 0.0, turns)], endpoint=CHAT)
        answer = {"role": "assistant", "content": "word0 word1"}
        asked = [{"role": "user", "content": f"say {number}"} for number in range(3)]
        assert [body["messages"] for body in server.bodies] == [
            [asked[0]],
            [asked[0], answer, asked[1]],
            [asked[0], answer, asked[1], answer, asked[2]],
        ]
    assert [record.turn for record in run.records] == [0, 1, 2]
    for before, after in zip(run.records, run.records[1:], strict=False):
        ended = before.reply.end_s - before.reply.sent_s + before.sent_s
        assert after.due_s == pytest.approx(ended + 0.01 * after.turn)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("status", "status 503: .*no room on the moon"),
        ("error", "ended with an error: .*the moon fell down"),
        ("garbage", "an event that is none .*{no json"),
        ("cut", "ended without"),
    ],
)
def test_failures_keep_their_words_and_end_a_chat(fault: str, words: str) -> None:
    turns = tuple(Turn(("say",), 2) for _ in range(3))
    with FakeOpenAIServer(faults=["", fault]) as server:
        run = run_load(server, [Session(0, 0.0, turns)], endpoint=CHAT)
    (failure,) = failures_of([run])
    assert failure["count"] == 1
    assert run.unsent == 1 and len(run.records) == 2
    assert re.search(words, failure["message"])
    figures = figures_of(run)
    assert figures["failed"] == 1 and figures["output_tokens"] == 2, "of whole answers alone"


def test_a_server_that_hangs_or_is_gone_is_a_failure() -> None:
    with FakeOpenAIServer() as server:
        server.held.set()
        hung = run_load(server, [single(0)], timeout_s=0.2)
    gone = run_load(server, [single(0)])
    assert failures_of([hung])[0]["message"] == "no whole answer within --request-timeout-s 0.2"
    assert failures_of([gone])[0]["message"].startswith("ConnectError")


def test_pieces_are_counted_where_the_server_tells_no_usage() -> None:
    with FakeOpenAIServer(tells_usage=False) as server:
        run = run_load(server, [single(0, tokens=5)])
    (record,) = run.records
    assert record.reply.output_tokens == 5 and record.reply.prompt_tokens is None and not record.reply.sources


def test_figures_across_seeds_are_medians_with_their_extremes() -> None:
    found = across_seeds([{"x": 3.0, "y": 1.0}, {"x": 1.0}, {"x": 2.0, "y": 2.0}])
    assert found == {"x": {"median": 2.0, "least": 1.0, "most": 3.0}}
