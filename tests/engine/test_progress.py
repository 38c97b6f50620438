"""How far a prompt is while its steps are computed: by the test's own clock, and in an engine at work."""

from __future__ import annotations

import threading

import pytest
from engine_harness import MakeEngine, wait_idle

from strata.engine import Chunk, GenerationRequest, SamplingParams
from strata.engine.api import Progress, TokenSources
from strata.engine.progress import PrefillProgress

PROMPT = [(5 * place + 1) % 97 for place in range(96)]


def test_a_prompt_by_the_clock() -> None:
    progress = PrefillProgress(1000)
    assert progress.report() == Progress(1000, 0, None, None)
    sources = TokenSources(host=400, computed=600)
    progress.begin(400, sources, now=10.0)
    assert progress.report() == Progress(1000, 400, None, sources)
    progress.note(600, now=14.0)
    assert progress.report() == Progress(1000, 600, pytest.approx(8.0), sources)
    progress.note(700, now=18.0)  # twice as slow: 30% of it counts
    assert progress.report().remaining_s == pytest.approx(300 * (0.02 + 0.3 * 0.02))
    progress.note(1005, now=19.0)
    assert progress.report() == Progress(1000, 1000, 0.0, sources), (
        "what was generated is no part of the prompt"
    )


def test_a_preempted_prompt_begins_anew_at_the_usual_pace() -> None:
    progress = PrefillProgress(1000)
    progress.begin(0, TokenSources(computed=1000), now=0.0, seconds_per_token=0.01)
    assert progress.report().remaining_s == pytest.approx(10.0)
    progress.note(500, now=100.0)
    again = TokenSources(device=200, computed=800)
    progress.begin(200, again, now=200.0, seconds_per_token=0.01)
    assert progress.report() == Progress(1000, 200, pytest.approx(8.0), again)


def test_a_prompt_in_an_engine_at_work(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(batch_tokens=16)
    seen: list[Progress] = []
    step_may_go, step_ended = threading.Semaphore(0), threading.Semaphore(0)
    note = engine._answers.note_progress

    def note_in_turn(plan: object) -> None:
        note(plan)  # type: ignore[arg-type]
        step_ended.release()
        assert step_may_go.acquire(timeout=20)

    monkeypatch.setattr(engine._answers, "note_progress", note_in_turn)
    stream = engine.submit(GenerationRequest(PROMPT, SamplingParams(max_tokens=2, ignore_eos=True)))
    assert stream.prompt.tolist() == PROMPT
    for _ in range(6):
        assert step_ended.acquire(timeout=20)
        seen.append(stream.progress())
        step_may_go.release()
    last: Chunk = list(stream)[-1]
    assert last.finish_reason == "length"
    assert [each.done_tokens for each in seen] == [16, 32, 48, 64, 80, 96]
    assert all(each.remaining_s is not None and each.remaining_s > 0 for each in seen[:-1])
    assert seen[-1].remaining_s == 0.0 and seen[0].sources == TokenSources(computed=96)
    monkeypatch.setattr(engine._answers, "note_progress", note)
    wait_idle(engine)
    # Whole pages of the prompt come from the cache and are done from the start.
    again = engine.submit(GenerationRequest(PROMPT, SamplingParams(max_tokens=1, ignore_eos=True)))
    list(again)
    sources = again.progress().sources
    assert sources is not None and sources.cached == 92 and again.progress().done_tokens == 96


def test_a_request_that_waits_has_no_sources(make_engine: MakeEngine) -> None:
    engine = make_engine(max_running=1)
    running = engine.submit(GenerationRequest(PROMPT, SamplingParams(max_tokens=200, ignore_eos=True)))
    waiting = engine.submit(GenerationRequest(PROMPT[::-1], SamplingParams(max_tokens=1)))
    next(iter(running))
    assert waiting.progress() == Progress(96, 0, None, None)
    running.abort()
    list(waiting)
    assert waiting.progress().done_tokens == 96
