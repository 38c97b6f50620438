"""Sends a run's requests when they are due, however the server keeps up, and never more than a limit at once.

A request is due at its intended time: a session's first at its arrival, each later one when the client has thought. One
that would pass the limit waits here, on the client, in order; its time to first token is told from both moments.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from strata.bench.load.client import Message, OpenAIClient, Reply
from strata.bench.load.schedule import Session

_HEAD_START_S = 0.05


@dataclass(frozen=True)
class Record:
    """One request. Seconds count from the start of the run; `limited` if it waited for the limit in flight."""

    topic: int
    turn: int
    due_s: float
    sent_s: float
    limited: bool
    reply: Reply


@dataclass
class Run:
    """All requests in the order in which they ended. `unsent` are rounds of chats that a failure ended."""

    records: list[Record] = field(default_factory=list)
    unsent: int = 0
    most_in_flight: int = 0
    seconds: float = 0.0


class InFlightLimit:
    """At most `most` at once, first come first served."""

    def __init__(self, most: int) -> None:
        self._free = asyncio.Semaphore(most)
        self._in_flight = 0
        self.peak = 0

    async def enter(self) -> bool:
        """Waits for a place. Returns whether it had to."""
        limited = self._free.locked()
        await self._free.acquire()
        self._in_flight += 1
        self.peak = max(self.peak, self._in_flight)
        return limited

    def leave(self) -> None:
        """Gives the place back."""
        self._in_flight -= 1
        self._free.release()


class Runner:
    """Sends one run after the other. `on_ended` is called after every request."""

    def __init__(
        self, client: OpenAIClient, endpoint: str, max_in_flight: int, on_ended: Callable[[], None]
    ) -> None:
        self._client = client
        self._endpoint = endpoint
        self._max_in_flight = max_in_flight
        self._on_ended = on_ended

    async def run(self, sessions: Sequence[Session]) -> Run:
        """Sends everything and waits for all answers; each is bounded by the client's timeout."""
        run = Run()
        limit = InFlightLimit(self._max_in_flight)
        tasks: list[asyncio.Task[None]] = []
        start = time.perf_counter() + _HEAD_START_S
        try:
            for session in sessions:
                # Made before it is due, so that making it delays nothing.
                text = session.turns[0].text()
                await _sleep_until(start + session.arrival_s)
                tasks.append(asyncio.create_task(self._session(session, text, start, run, limit)))
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        run.most_in_flight = limit.peak
        run.seconds = max((record.reply.end_s for record in run.records), default=start) - start
        return run

    async def _session(
        self, session: Session, text: str, start: float, run: Run, limit: InFlightLimit
    ) -> None:
        messages: list[Message] = []
        due = start + session.arrival_s
        for number, turn in enumerate(session.turns):
            if number:
                text = turn.text()
                await _sleep_until(due)
            messages.append({"role": "user", "content": text})
            limited = await limit.enter()
            try:
                reply = await self._client.ask(self._endpoint, messages, turn.max_tokens)
            finally:
                limit.leave()
            run.records.append(
                Record(session.topic, number, due - start, reply.sent_s - start, limited, reply)
            )
            self._on_ended()
            if reply.error is not None:
                run.unsent += len(session.turns) - number - 1
                return
            messages.append({"role": "assistant", "content": reply.text})
            if number + 1 < len(session.turns):
                due = reply.end_s + session.turns[number + 1].think_s


async def _sleep_until(moment: float) -> None:
    await asyncio.sleep(max(0.0, moment - time.perf_counter()))
