"""An engine of a few lines on Strata's scheduler: what it samples depends on every byte that it reads back, so a wrong
page is a wrong answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tiered_pages import LAYERS, PAGE_SIZE

from strata import Plan, Refusal, Scheduler
from strata.errors import ConfigError, RequestError, StrataError

VOCABULARY = 50


def mix(state: float, token: int) -> float:
    return float((state * 31 + token + 1) % 1_000_003)


def oracle(prompt: Sequence[int], count: int) -> list[int]:
    """What is generated without any cache."""
    state, answer = 1.0, []
    for token in prompt:
        state = mix(state, token)
    while len(answer) < count:
        answer.append(int(state) % VOCABULARY)
        state = mix(state, answer[-1])
    return answer


class Engine:
    """Keeps the state after each token in the pool, in every layer."""

    def __init__(self, **settings: Any) -> None:
        self.pool = np.zeros((LAYERS, 1, 16, PAGE_SIZE, 1))
        self.scheduler = Scheduler(self.pool, PAGE_SIZE, host_memory="1MiB", load_policy="always", **settings)
        self.answers: dict[int, list[int]] = {}
        self.wanted: dict[int, int] = {}
        self.sources: dict[int, tuple[int, ...]] = {}
        self.refusals: dict[int, Refusal] = {}
        self.to_fail = 0
        self.held: list[Plan] = []

    def ask(self, request: int, prompt: Sequence[int], count: int, **settings: Any) -> None:
        self.answers[request], self.wanted[request] = [], count
        self.scheduler.submit(request, prompt, count, **settings)

    def run(self) -> None:
        """Until every answer is there or refused."""
        for _ in range(500):
            open_requests = self.answers.keys() - self.refusals.keys()
            if all(len(self.answers[request]) >= self.wanted[request] for request in open_requests):
                return
            self.step()
        raise AssertionError(f"no end of {self.answers}: {self.scheduler.waiting()}")

    def step(self) -> None:
        work = self.scheduler.next_work(1.0)
        if isinstance(work, Refusal):
            self.refusals[work.request] = work
        elif work is not None and self.to_fail:
            self.to_fail -= 1
            self.scheduler.failed(work)
        elif work is not None:
            self.carry_out(work)

    def carry_out(self, plan: Plan) -> None:
        for row, *sources in plan.admitted:
            self.sources.setdefault(plan.requests[row], tuple(sources[:4]))
        tokens, slots = plan.token_ids(), plan.slot_mapping()
        for layer in range(LAYERS):
            self.scheduler.wait_layer(plan, layer, 10.0)
        sampled: list[int | None] = []
        finished, begin = [], 0
        for request, length, context, sample, table in zip(
            plan.requests,
            plan.query_lengths,
            plan.context_lengths,
            plan.samples,
            plan.page_tables(),
            strict=True,
        ):
            answer = self.answers[request]
            last = context - length - 1
            states = self.pool[:, 0, table[last // PAGE_SIZE], last % PAGE_SIZE, 0] if last >= 0 else [1.0]
            assert len(set(states)) == 1, "the layers do not agree"
            state = float(states[0])
            for index in range(begin, begin + length):
                state = mix(state, int(tokens[index]) if tokens[index] >= 0 else answer[-1])
                self.pool[:, 0, slots[index] // PAGE_SIZE, slots[index] % PAGE_SIZE, 0] = state
            begin += length
            if sample:
                answer.append(int(state) % VOCABULARY)
            sampled.append(answer[-1] if sample else None)
            finished.append(False)
        self.scheduler.done(plan, sampled, finished, busy_s=0.001)


PROMPT = list(range(10))


def test_requests_are_answered_and_prefixes_come_back() -> None:
    engine = Engine()
    with engine.scheduler:
        engine.ask(1, PROMPT, 4)
        engine.ask(2, [*PROMPT[:6], 40, 41, 42], 3)
        engine.run()
        engine.ask(3, PROMPT, 4)
        engine.run()
        assert engine.sources[1] == (0, 0, 0, len(PROMPT))
        assert engine.sources[3] == (8, 0, 0, 2)
        engine.scheduler.demote("device")
        engine.pool[:] = np.nan
        engine.ask(4, PROMPT, 4)
        engine.run()
        assert engine.sources[4] == (0, 8, 0, 2)
        for request in (1, 3, 4):
            assert engine.answers[request] == oracle(PROMPT, 4)
        assert engine.answers[2] == oracle([*PROMPT[:6], 40, 41, 42], 3)
        assert engine.scheduler.settle() and engine.scheduler.check()


def test_a_failed_step_is_tried_again_and_a_refusal_says_why() -> None:
    engine = Engine(max_running=2)
    with engine.scheduler:
        engine.to_fail = 2
        engine.ask(1, PROMPT, 3)
        engine.ask(2, range(100), 3)
        engine.run()
        assert engine.answers[1] == oracle(PROMPT, 3)
        assert "can never fit the device pool of 32 tokens" in engine.refusals[2].reason


def test_an_aborted_request_leaves_nothing_held() -> None:
    engine = Engine()
    with engine.scheduler:
        engine.ask(1, PROMPT, 20)
        for _ in range(4):
            engine.step()
        engine.scheduler.abort(1)
        while isinstance(plan := engine.scheduler.next_work(0.2), Plan):
            engine.carry_out(plan)
        assert engine.scheduler.settle() and engine.scheduler.check()
        assert engine.scheduler.waiting() == []


def test_wrong_reports_are_refused_in_words() -> None:
    engine = Engine()
    with engine.scheduler:
        engine.scheduler.submit(1, PROMPT, 2)
        plan = engine.scheduler.next_work(5.0)
        assert isinstance(plan, Plan)
        with pytest.raises(RequestError, match="has 1 rows; 2 tokens"):
            engine.scheduler.done(plan, [1, 2], [False])
        with pytest.raises(RequestError, match="asks for a token"):
            engine.scheduler.done(plan, [None], [False])
        with pytest.raises(RequestError, match="no failure 'bad luck'"):
            engine.scheduler.failed(plan, "bad luck")
        with pytest.raises(RequestError, match="number must be"):
            engine.scheduler.submit(-1, PROMPT, 2)
        engine.scheduler.done(plan, [3], [True])
    with pytest.raises(RequestError, match="closed"):
        engine.scheduler.submit(2, PROMPT, 2)
    with pytest.raises(ConfigError, match="--policy"):
        Engine(policy="dice")


def next_plan(engine: Engine) -> Plan:
    plan = engine.scheduler.next_work(5.0)
    assert isinstance(plan, Plan)
    return plan


def test_core_hears_of_a_failure_though_the_device_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    with engine.scheduler:
        engine.ask(1, PROMPT, 3)
        plan = next_plan(engine)

        def silent() -> None:
            raise StrataError("the device says nothing")

        with monkeypatch.context() as patch:
            patch.setattr(engine.scheduler, "step_done", silent)
            with pytest.raises(StrataError, match="says nothing"):
                engine.scheduler.failed(plan)
        engine.run()
        assert engine.answers[1] == oracle(PROMPT, 3)


def test_reports_come_once_and_in_order() -> None:
    engine = Engine(outstanding_plans=2)
    with engine.scheduler:
        engine.ask(1, PROMPT, 3)
        first = next_plan(engine)
        second = next_plan(engine)
        for report in (
            lambda: engine.scheduler.done(second, [1], [False]),
            lambda: engine.scheduler.failed(second),
        ):
            with pytest.raises(
                RequestError, match=f"plan {second.id} is not the oldest.*plan {first.id} comes first"
            ):
                report()
        engine.carry_out(first)
        with pytest.raises(RequestError, match=f"plan {first.id} is not the oldest"):
            engine.scheduler.failed(first)
        engine.scheduler.failed(second)
        epoch = engine.scheduler._epoch
        engine.scheduler.failed(first)  # void with it
        engine.scheduler.done(second, [1], [False])
        assert engine.scheduler._epoch == epoch
        engine.run()
        assert engine.answers[1] == oracle(PROMPT, 3)
