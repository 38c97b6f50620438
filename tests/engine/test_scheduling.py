"""What the scheduler is for, seen from outside: nothing is computed twice, and nobody waits for what is there."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from engine_harness import VOCABULARY, Answer, MakeEngine, Sizes, ask, assert_exact, read, wait_idle

from strata.engine import Engine, GenerationRequest, SamplingParams, ServedModel

PAGE = 4


def at_once(engine: Engine, prompts: Sequence[Sequence[int]]) -> list[Answer]:
    """The answers of requests that are all submitted before any is read."""
    sampling = SamplingParams(max_tokens=4)
    streams = [engine.submit(GenerationRequest(prompt, sampling)) for prompt in prompts]
    return [read(stream) for stream in streams]


def document(length: int, seed: int) -> list[int]:
    """Tokens that repeat late."""
    return [(seed + place * place * 3 + place) % VOCABULARY for place in range(length)]


@pytest.mark.parametrize("policy", ["adaptive", "static"])
def test_eight_misses_on_one_document_compute_it_once(
    make_engine: MakeEngine, served: ServedModel, policy: str
) -> None:
    engine = make_engine(
        sizes=Sizes(PAGE, 600, 600, 0),
        policy=policy,
        batch_tokens=1024,
        deferral_tokens=20,
        deferral_factor=50.0,
    )
    shared = document(300, 1)
    prompts = [[*shared, *document(5 + index, 10 + index)] for index in range(8)]
    answers = at_once(engine, prompts)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert_exact(served.model, prompt, answer)
    computed = sum(answer.sources[3] for answer in answers)
    questions = sum(len(prompt) - len(shared) for prompt in prompts)
    assert computed <= len(shared) + questions + 8 * PAGE, [answer.sources for answer in answers]
    wait_idle(engine)


def test_the_wait_for_another_can_be_turned_off(make_engine: MakeEngine, served: ServedModel) -> None:
    engine = make_engine(sizes=Sizes(PAGE, 600, 600, 0), batch_tokens=1024, scheduler_off="defer")
    shared = document(100, 2)
    prompts = [[*shared, *document(3, 20 + index)] for index in range(4)]
    for prompt, answer in zip(prompts, at_once(engine, prompts), strict=True):
        assert_exact(served.model, prompt, answer)
    assert engine.stats()["deferrals"] == 0


def test_sharers_of_what_is_on_the_device_are_never_deferred(
    make_engine: MakeEngine, served: ServedModel
) -> None:
    engine = make_engine(sizes=Sizes(PAGE, 900, 0, 0), deferral_tokens=8)
    shared = document(120, 3)
    ask(engine, [*shared, 1])
    prompts = [[*shared, *document(4, 30 + index)] for index in range(50)]
    for prompt, answer in zip(prompts, at_once(engine, prompts), strict=True):
        assert_exact(served.model, prompt, answer)
        assert answer.sources[0] == len(shared), answer.sources
    stats = engine.stats()
    assert stats["deferrals"] == stats["deferred_rounds"] == 0
    assert engine.waiting() == []


def test_who_waits_is_told_why(make_engine: MakeEngine) -> None:
    engine = make_engine(sizes=Sizes(PAGE, 600, 0, 0), max_running=1)
    sampling = SamplingParams(max_tokens=200)
    streams = [engine.submit(GenerationRequest(document(30, 40 + index), sampling)) for index in range(3)]
    reports = engine.waiting()
    while len(reports) > 2:
        reports = engine.waiting()
    assert [report.request_id for report in reports] == [stream.request_id for stream in streams[1:]]
    assert all("--max-running" in report.why for report in reports), reports
    for stream in streams:
        stream.abort()
        read(stream)
