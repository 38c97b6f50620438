"""Whatever clients, steps or operators do, streams end, the engine lives, and pages come back."""

from __future__ import annotations

import asyncio
import threading
import time

import numpy as np
import pytest
from engine_harness import (
    MakeEngine,
    Sizes,
    WatchedModel,
    ask,
    assert_exact,
    eventually,
    read,
    wait_idle,
)

from strata.engine import Chunk, Engine, GenerationRequest, RequestStream, SamplingParams, ServedModel
from strata.errors import CapacityError, ConfigError, RequestError, StorageError, StrataError
from strata.models import ForwardBatch

PROMPT = [(3 * place + 2) % 97 for place in range(30)]
GATE_S = 30.0


def submit(engine: Engine, prompt: list[int], most: int = 8, **sampling: object) -> RequestStream:
    return engine.submit(GenerationRequest(prompt, SamplingParams(max_tokens=most, **sampling)))


def slow(watched: WatchedModel, seconds: float = 0.01) -> None:
    watched.before = lambda batch: time.sleep(seconds)


def test_shutdown_ends_running_streams(make_engine: MakeEngine) -> None:
    watched = WatchedModel()
    slow(watched)
    engine = make_engine(served=watched.served, max_running=4)
    streams = [submit(engine, [index, *PROMPT], 200) for index in range(10)]
    assert eventually(lambda: engine.stats()["generated_tokens"] > 8)
    engine.shutdown(drain_s=0.0, demote_s=0.0)
    assert [read(stream).reason for stream in streams] == ["abort"] * 10
    with pytest.raises(StrataError, match=r"stopped|shutting down"):
        submit(engine, PROMPT)
    assert not engine.health().ok and not engine.health().ready
    assert engine.shutdown() == engine.shutdown()


def test_shutdown_drains(make_engine: MakeEngine) -> None:
    engine = make_engine()
    streams = [submit(engine, [index, *PROMPT], 20) for index in range(5)]
    engine.shutdown(drain_s=30.0, demote_s=5.0)
    assert [read(stream).reason for stream in streams] == ["length"] * 5


def test_a_stream_is_read_while_the_engine_stops(make_engine: MakeEngine) -> None:
    watched = WatchedModel()
    slow(watched)
    engine = make_engine(served=watched.served)
    found: list[str | None] = []
    streams = [submit(engine, PROMPT, 200) for _ in range(3)]
    readers = [
        threading.Thread(target=lambda stream: found.append(read(stream).reason), args=(stream,))
        for stream in streams
    ]
    for reader in readers:
        reader.start()
    engine.shutdown(drain_s=0.1, demote_s=0.0)
    for reader in readers:
        reader.join(10.0)
    assert found == ["abort"] * 3


def test_aborts(make_engine: MakeEngine) -> None:
    watched = WatchedModel()
    gate = threading.Event()
    watched.before = lambda batch: None if gate.wait(GATE_S) else pytest.fail("the gate stayed shut")
    engine = make_engine(served=watched.served)
    before_first = submit(engine, PROMPT, 50)
    queued = submit(engine, [1, *PROMPT], 50)
    kept = submit(engine, [2, *PROMPT], 50)
    assert eventually(lambda: engine.stats()["running"] > 0)
    for stream in (before_first, queued):
        aborter = threading.Thread(target=stream.abort)
        aborter.start()
        aborter.join(10.0)
        stream.abort()
    # They end at once, also while a step is running.
    for stream in (before_first, queued):
        chunks = list(stream)
        assert [chunk.finish_reason for chunk in chunks] == ["abort"]
        assert chunks[0].usage is not None and chunks[0].usage.completion_tokens == 0
    gate.set()
    answer = read(kept)
    assert_exact(watched.model, [2, *PROMPT], answer)
    kept.abort()
    before_first.abort()
    wait_idle(engine)
    assert engine.stats()["aborted"] == 2


@pytest.mark.parametrize("failing", [{1}, {2}, {3, 7}, {1, 2}])
def test_a_step_that_fails_is_repeated(make_engine: MakeEngine, failing: set[int]) -> None:
    watched = WatchedModel()

    def fail(batch: ForwardBatch) -> None:
        if watched.forwards in failing:
            raise RuntimeError("a step that fails for a test")

    watched.before = fail
    engine = make_engine(served=watched.served)
    streams = [submit(engine, [index, *PROMPT], 12) for index in range(4)]
    for index, stream in enumerate(streams):
        answer = read(stream)
        assert answer.reason == "length" and len(answer.tokens) == 12
        assert_exact(watched.model, [index, *PROMPT], answer)
    wait_idle(engine)


def test_failures_far_apart_do_not_add_up(make_engine: MakeEngine) -> None:
    watched = WatchedModel()

    def fail(batch: ForwardBatch) -> None:
        if watched.forwards % 8 == 5:
            raise RuntimeError("a step that fails for a test")

    watched.before = fail
    engine = make_engine(served=watched.served)
    answer = read(submit(engine, PROMPT, 60))
    assert_exact(watched.model, PROMPT, answer)
    assert answer.reason == "length"


def test_a_request_whose_steps_always_fail_ends_alone(make_engine: MakeEngine) -> None:
    """It takes nobody with it who was in its batch."""
    watched = WatchedModel()

    def fail(batch: ForwardBatch) -> None:
        if (batch.token_ids == 96).any():
            raise RuntimeError("a step that fails for a test")

    watched.before = fail
    engine = make_engine(served=watched.served)
    poisoned = submit(engine, [96, *PROMPT], 12)
    others = [submit(engine, [index, *PROMPT[:20]], 2) for index in range(4)]
    with pytest.raises(StorageError):
        read(poisoned)
    for index, stream in enumerate(others):
        assert_exact(watched.model, [index, *PROMPT[:20]], read(stream))
    assert engine.health().ok
    wait_idle(engine)


def test_steps_that_always_fail_end_the_requests_not_the_engine(make_engine: MakeEngine) -> None:
    watched = WatchedModel()
    broken = True

    def fail(batch: ForwardBatch) -> None:
        if broken:
            raise RuntimeError("a step that fails for a test")

    watched.before = fail
    engine = make_engine(served=watched.served)
    streams = [submit(engine, [index, *PROMPT], 12) for index in range(3)]
    for stream in streams:
        with pytest.raises(StrataError):
            read(stream)
    wait_idle(engine)
    broken = False
    assert engine.health().ok
    assert_exact(watched.model, PROMPT, ask(engine, PROMPT))


def test_nobody_waits_for_a_slow_reader(make_engine: MakeEngine, served: ServedModel) -> None:
    engine = make_engine()
    unread = submit(engine, PROMPT, 100)
    for index in range(3):
        assert_exact(served.model, [index, *PROMPT], ask(engine, [index, *PROMPT]))
    wait_idle(engine)
    answer = read(unread)
    assert len(answer.tokens) == 100
    assert_exact(served.model, PROMPT, answer)


def test_streams_on_an_event_loop(make_engine: MakeEngine, served: ServedModel) -> None:
    engine = make_engine()

    async def consume(index: int) -> list[Chunk]:
        stream = submit(engine, [index, *PROMPT], 20)
        chunks = []
        async for chunk in stream:
            chunks.append(chunk)
            if index == 3 and len(chunks) == 5:
                stream.abort()
        return chunks

    async def everyone() -> list[list[Chunk]]:
        return await asyncio.wait_for(asyncio.gather(*(consume(index) for index in range(8))), 60.0)

    for index, chunks in enumerate(asyncio.run(everyone())):
        tokens = [token for chunk in chunks for token in chunk.token_ids]
        # An abort may come after the last token was sampled.
        assert chunks[-1].finish_reason in (("abort", "length") if index == 3 else ("length",))
        assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        logits = served.model.reference_forward([index, *PROMPT, *tokens[:-1]])
        assert logits[len(PROMPT) :].argmax(-1).tolist() == tokens
    wait_idle(engine)


def test_a_reader_whose_loop_is_gone(make_engine: MakeEngine, served: ServedModel) -> None:
    watched = WatchedModel()
    slow(watched)
    engine = make_engine(served=watched.served)

    async def leave_early() -> RequestStream:
        stream = submit(engine, PROMPT, 60)
        async for _ in stream:
            return stream
        raise AssertionError("an empty stream")

    asyncio.run(leave_early())
    assert_exact(served.model, [1, *PROMPT], ask(engine, [1, *PROMPT]))
    wait_idle(engine)
    assert engine.health().ok


def test_what_can_never_fit_is_refused_with_both_numbers(
    make_engine: MakeEngine, served: ServedModel
) -> None:
    engine = make_engine(sizes=Sizes(device=10))
    fits = [place % 97 for place in range(36)]
    assert len(ask(engine, fits, 5).tokens) == 5, "40 places hold 36 tokens and the 4 that are computed from"
    with pytest.raises(RequestError, match=r"36.*41"):
        submit(engine, fits, 6)
    with pytest.raises(RequestError, match=r"500.*41.* that --device-memory leaves of the model's 65536"):
        submit(engine, [1] * 500, 1)
    assert engine.context.whole_bytes == 65536 // 4 * Sizes(page=4).page_bytes(served.model)
    wait_idle(engine)


def test_the_context_is_as_long_as_the_operator_wants(make_engine: MakeEngine, served: ServedModel) -> None:
    engine = make_engine(max_model_len=30)
    assert engine.max_context == 30
    assert len(ask(engine, [5] * 25, 5).tokens) == 5
    with pytest.raises(RequestError, match=r"31 fit into the context of 30 tokens that --max-model-len sets"):
        submit(engine, [5] * 25, 7)
    assert engine.context.whole_bytes == 8 * Sizes(page=4).page_bytes(served.model)
    wait_idle(engine)
    assert make_engine(max_model_len=0).max_context == 400, "what the device tier holds"
    with pytest.raises(ConfigError, match=r"--max-model-len 65537 is more than the 65536 tokens"):
        make_engine(max_model_len=65537)


@pytest.mark.parametrize(
    "request_",
    [
        GenerationRequest([]),
        GenerationRequest([97]),
        GenerationRequest([-1]),
        GenerationRequest([1], SamplingParams(max_tokens=0)),
        GenerationRequest([1], SamplingParams(temperature=-1.0)),
        GenerationRequest([1], SamplingParams(temperature=float("nan"))),
        GenerationRequest([1], SamplingParams(top_p=0.0)),
        GenerationRequest([1], SamplingParams(top_k=-1)),
        GenerationRequest([1], SamplingParams(min_p=1.5)),
        GenerationRequest([1], SamplingParams(repetition_penalty=0.0)),
        GenerationRequest([1], SamplingParams(presence_penalty=float("nan"))),
        GenerationRequest([1], SamplingParams(frequency_penalty=2.5)),
        GenerationRequest([1], SamplingParams(logit_bias=((97, 1.0),))),
        GenerationRequest([1], SamplingParams(logit_bias=((3, float("inf")),))),
        GenerationRequest([1], SamplingParams(logit_bias=((3, 1.0),) * 1025)),
        GenerationRequest([1], SamplingParams(stop=("x",) * 65)),
        GenerationRequest([1], SamplingParams(stop=("x" * 1001,))),
        GenerationRequest([1], SamplingParams(repetition_penalty=1e30)),
        GenerationRequest([1], SamplingParams(logprobs=21)),
        GenerationRequest([1], SamplingParams(prompt_logprobs=-1)),
        GenerationRequest([1], SamplingParams(max_tokens=3), priority=1 << 40),
        GenerationRequest([1], SamplingParams(max_tokens=3), cache_salt="\ud800"),
        GenerationRequest([1], SamplingParams(max_tokens=3), cache_salt="x" * 2049),
    ],
)
def test_bad_requests_leave_no_trace(make_engine: MakeEngine, request_: GenerationRequest) -> None:
    engine = make_engine()
    with pytest.raises(RequestError):
        engine.submit(request_)
    assert not engine._answers.sequences, "a refused request is still counted as waiting"
    assert len(ask(engine, PROMPT, 2).tokens) == 2


def test_numpy_prompts(make_engine: MakeEngine, served: ServedModel) -> None:
    engine = make_engine()
    for dtype in (np.int32, np.int64, np.uint32):
        assert_exact(served.model, PROMPT, ask(engine, np.array(PROMPT, dtype=dtype), 6))  # type: ignore[arg-type]


def test_a_full_queue_refuses(make_engine: MakeEngine) -> None:
    watched = WatchedModel()
    gate = threading.Event()
    watched.before = lambda batch: None if gate.wait(GATE_S) else pytest.fail("the gate stayed shut")
    engine = make_engine(served=watched.served, max_running=1, max_waiting=5)
    streams: list[RequestStream] = []
    with pytest.raises(CapacityError, match="max-waiting"):
        for index in range(50):
            streams.append(submit(engine, [index, *PROMPT], 4))
            assert eventually(lambda: engine.stats()["running"] == 1)
    assert len(streams) == 6
    gate.set()
    for index, stream in enumerate(streams):
        assert_exact(watched.model, [index, *PROMPT], read(stream))
    assert len(ask(engine, PROMPT, 2).tokens) == 2


def test_who_left_makes_room_at_once(make_engine: MakeEngine) -> None:
    """Core still holds those who left when the next ones come; what `submit` accepted is answered all the same."""
    watched = WatchedModel()
    gate = threading.Event()
    watched.before = lambda batch: None if gate.wait(GATE_S) else pytest.fail("the gate stayed shut")
    engine = make_engine(served=watched.served, max_running=2, max_waiting=2)
    for _ in range(2):
        for stream in [submit(engine, [index, *PROMPT], 4) for index in range(4)]:
            stream.abort()
        assert not engine._answers.sequences
    streams = [submit(engine, [index, *PROMPT], 4) for index in range(4)]
    gate.set()
    for index, stream in enumerate(streams):
        assert_exact(watched.model, [index, *PROMPT], read(stream))


def test_a_burst_that_fits_is_served(make_engine: MakeEngine, served: ServedModel) -> None:
    """What `submit` accepted is not refused later because nobody was admitted yet."""
    engine = make_engine(max_running=40, max_waiting=1)
    streams = [submit(engine, [index, *PROMPT[:8]], 2) for index in range(41)]
    for index, stream in enumerate(streams):
        assert_exact(served.model, [index, *PROMPT[:8]], read(stream))


def test_priority_goes_first_however_long_the_queue(make_engine: MakeEngine) -> None:
    watched = WatchedModel()
    gate = threading.Event()
    order: list[int] = []

    def note(batch: ForwardBatch) -> None:
        order.append(int(batch.token_ids[0]) if len(batch.token_ids) > 25 else -1)
        if not gate.wait(GATE_S):
            pytest.fail("the gate stayed shut")

    watched.before = note
    engine = make_engine(served=watched.served, max_running=1, outstanding_plans=1)
    first = submit(engine, PROMPT, 1)
    assert eventually(lambda: engine.stats()["running"] == 1)
    streams = [submit(engine, [index, *PROMPT], 1) for index in range(80)]
    urgent = engine.submit(GenerationRequest([90, *PROMPT], SamplingParams(max_tokens=1), priority=1))
    assert eventually(lambda: engine.stats()["waiting"] == 81)
    gate.set()
    for stream in (first, urgent, *streams):
        read(stream)
    assert order[:2] == [PROMPT[0], 90], f"the urgent request was computed after {order.index(90) - 1} others"


def test_a_device_of_one_page_is_refused(make_engine: MakeEngine) -> None:
    with pytest.raises(ConfigError, match="device-memory"):
        make_engine(sizes=Sizes(device=1))


class BrokenDetokenizer:
    """Fails at the third token."""

    def __init__(self) -> None:
        self.pushed = 0

    def push(self, token_id: int) -> str:
        self.pushed += 1
        if self.pushed == 3:
            raise ValueError("a text that fails for a test")
        return "x"

    def finish(self) -> str:
        return ""


def test_an_answer_without_text_ends_alone(make_engine: MakeEngine, served: ServedModel) -> None:
    engine = make_engine()
    broken, good = submit(engine, PROMPT, 12), submit(engine, [5, *PROMPT], 12)
    engine._answers.sequences[broken.request_id].text._detokenizer = BrokenDetokenizer()
    with pytest.raises(StrataError, match="cannot be turned into text"):
        read(broken)
    assert_exact(served.model, [5, *PROMPT], read(good))
    wait_idle(engine)
    assert engine.health().ok


def test_a_second_shutdown_waits_for_the_first(make_engine: MakeEngine) -> None:
    engine = make_engine()
    ask(engine, PROMPT)
    reports: list[dict[str, int]] = []
    threads = [threading.Thread(target=lambda: reports.append(engine.shutdown(5.0, 5.0))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(reports) == 3
    assert reports[0] == reports[1] == reports[2] != {}
