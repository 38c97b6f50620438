"""The engine with its transfers on a device of its own: the whole road of `--device cuda`, on a fake device and a tiny
model that computes on the host.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from engine_harness import (
    MakeEngine,
    Sizes,
    WatchedModel,
    ask,
    assert_exact,
    eventually,
    nonzero,
    wait_idle,
)
from pressure import Load, assert_clean, device_pages, run_clients

from strata.device.cuda_runtime import DeviceError, Event, Stream
from strata.device.fake_cuda import FakeCudaRuntime
from strata.engine import ServedModel
from strata.errors import CapacityError, ConfigError, StrataError
from strata.models import ForwardBatch

FIRST = [(3 * place) % 89 for place in range(41)]
SECOND = [(5 * place + 1) % 89 for place in range(33)]


def test_a_prompt_comes_back_from_the_host(make_engine: MakeEngine, served: ServedModel) -> None:
    fake = FakeCudaRuntime(1)
    engine = make_engine(cuda=fake)
    cold = ask(engine, FIRST)
    wait_idle(engine)
    engine.demote(["device"])
    warm = ask(engine, FIRST)
    assert warm.sources == (0, 40, 0, 1) and warm.tokens == cold.tokens
    assert_exact(served.model, FIRST, warm)
    wait_idle(engine)
    stats = engine.stats()
    assert stats["load_completed"] > 0 and stats["backup_completed"] > 0, nonzero(engine)
    reports = {report.name: report for report in engine.tiers()}
    assert fake.describe() in reports["device"].detail and "pinned" in reports["host"].detail
    assert fake.registered
    engine.shutdown(drain_s=0.0, demote_s=0.0)
    assert not fake.registered and fake.is_empty


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_every_token_is_the_cache_off_one_under_pressure(
    make_engine: MakeEngine, served: ServedModel, seed: int
) -> None:
    load = Load(seed, clients=24, documents=6, document_tokens=(16, 60), pause_s=0.2)
    sizes = Sizes(4, device_pages(load, 4, 1.9), 120, 4 << 20)
    engine = make_engine(sizes=sizes, cuda=FakeCudaRuntime(seed))
    outcome = run_clients(engine, served.model, load)
    assert_clean(engine, outcome)
    stats = engine.stats()
    assert stats["load_completed"] > 10 and stats["device_evicted_pages"] > 0, nonzero(engine)


def test_a_prompt_comes_back_from_the_disk(make_engine: MakeEngine) -> None:
    engine = make_engine(cuda=FakeCudaRuntime(2), sizes=Sizes(host=0))
    cold = ask(engine, FIRST)
    wait_idle(engine)
    engine.demote(["device"])
    warm = ask(engine, FIRST)
    assert warm.tokens == cold.tokens and warm.sources == (0, 0, 40, 1)
    wait_idle(engine)


@pytest.mark.parametrize(
    ("method", "call"), [("launch", 2), ("copy_async", 1), ("record", 2), ("stream_wait_event", 1)]
)
def test_a_transfer_that_cannot_be_queued_becomes_a_recompute(
    make_engine: MakeEngine, served: ServedModel, method: str, call: int
) -> None:
    fake = FakeCudaRuntime(3)
    engine = make_engine(cuda=fake)
    cold = ask(engine, FIRST)
    wait_idle(engine)
    engine.demote(["device"])
    fake.fail_next(method, call)
    answer = ask(engine, FIRST)
    assert answer.tokens == cold.tokens
    assert_exact(served.model, SECOND, ask(engine, SECOND))
    assert fake.sticky_errors == 0
    wait_idle(engine)
    assert engine.health().ok


@pytest.mark.parametrize("setting", ["copy_bandwidth", "copy_threads", "backup_niceness"])
def test_settings_of_copy_threads_are_refused(make_engine: MakeEngine, setting: str) -> None:
    flag = "--" + setting.replace("_", "-")
    with pytest.raises(ConfigError, match=rf"{flag} \S+.* --device cuda has none.*--device cpu"):
        make_engine(cuda=FakeCudaRuntime(), **{setting: 2})


LOST = "the device is lost: restart the server"


@pytest.mark.parametrize("found_by", ["the Mover", "a step"])
def test_a_lost_device_ends_the_engine_and_everybody_is_told(make_engine: MakeEngine, found_by: str) -> None:
    fake = FakeCudaRuntime(4, lose_on=("query", "record"))
    engine = make_engine(cuda=fake)
    if found_by == "the Mover":
        ask(engine, FIRST)
        wait_idle(engine)
        engine.demote(["device"])
        fake.fail_next("query", 1)
    else:
        # Nothing is to be moved yet: the Mover does not look at the device.
        fake.fail_next("record", 1)
    with pytest.raises(StrataError, match=LOST):
        # The fake's compute stream is lost with it, as a GPU's would be.
        ask(engine, FIRST)
    assert eventually(lambda: not engine.health().ok)
    health = engine.health()
    assert not health.ready and any(LOST in problem for problem in health.problems), health
    with pytest.raises(StrataError, match=LOST):
        ask(engine, SECOND)
    engine.shutdown(drain_s=0.0, demote_s=0.0)
    assert any(LOST in problem for problem in engine.health().problems)


class LateRuntime(FakeCudaRuntime):
    """The ends of steps are reached only while somebody asks for them, one a question, until `let_go`."""

    def __init__(self) -> None:
        super().__init__(6)
        self.ends: deque[Event] = deque()
        self.late = False

    def record(self, event: Event, stream: Stream) -> None:
        with self._lock:
            if not self.late or stream != self.compute_stream():
                super().record(event, stream)
                return
            self._events[event].queued += 1
            self.ends.append(event)

    def query(self, event: Event) -> bool:
        with self._lock:
            if event in self.ends:
                self._events[self.ends.popleft()].reached += 1
            return super().query(event)

    def let_go(self) -> None:
        """The device has caught up, and does from now on."""
        with self._lock:
            self.late = False
            while self.ends:
                self._events[self.ends.popleft()].reached += 1


def test_the_host_is_never_more_than_a_step_ahead(make_engine: MakeEngine) -> None:
    """So a load, which waits for the latest step's end, is not held up by all chunks of somebody's long prompt."""
    fake, watched = LateRuntime(), WatchedModel()
    engine = make_engine(cuda=fake, served=watched.served, batch_tokens=8, write_policy="selective")
    running: list[int] = []

    def note(batch: ForwardBatch) -> None:
        # Every step records two ends, the Mover's and the tier's own.
        running.append(-(-len(fake.ends) // 2))

    watched.before, fake.late = note, True
    answer = ask(engine, FIRST, max_tokens=1)
    fake.let_go()
    assert len(running) == 6 and max(running) == 1, running
    assert_exact(watched.model, FIRST, answer)
    wait_idle(engine)


class NotingRuntime:
    """A `Runtime` that notes what steps are said to have taken."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self.told: list[tuple[int, int, float]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    def measured(self, tokens: int, context: int, busy_s: float) -> None:
        self.told.append((tokens, context, busy_s))


def test_chunks_are_measured_without_a_token_from_them(make_engine: MakeEngine) -> None:
    fake = LateRuntime()
    engine = make_engine(cuda=fake, batch_tokens=8)
    engine._runtime = noting = NotingRuntime(engine._runtime)
    fake.late = True
    ask(engine, FIRST, max_tokens=1)
    fake.let_go()
    # Forty tokens in chunks of eight; the fifth's end is seen by nobody, since the sixth samples.
    assert [one[:2] for one in noting.told] == [(8, 0), (8, 8), (8, 16), (8, 24)]
    assert all(0 < busy_s < 5.0 for *_, busy_s in noting.told)
    wait_idle(engine)


def test_a_step_that_does_not_end_fails_the_one_after_the_next(make_engine: MakeEngine) -> None:
    fake = LateRuntime()
    tier = make_engine(cuda=fake)._tier
    fake.late, fake.query = True, lambda event: event not in fake.ends  # type: ignore[method-assign]
    tier.step_done()
    tier.wait_step_before(0.0)
    tier.step_done()
    with pytest.raises(DeviceError, match=r"still runs on the device after 0.01 s.*--batch-tokens"):
        tier.wait_step_before(0.01)
    assert not tier.lost
    fake.let_go()
    tier.wait_step_before(0.0)


def test_a_resize_keeps_the_memory_that_the_device_knows(make_engine: MakeEngine) -> None:
    fake = FakeCudaRuntime(5)
    engine = make_engine(cuda=fake)
    before = dict(fake.registered)
    cold = ask(engine, FIRST)
    page = int(engine.stats()["page_bytes"])
    engine.resize("device", 30 * page)
    engine.resize("host", 20 * 4096)
    assert ask(engine, FIRST).tokens == cold.tokens
    engine.resize("device", 100 * page)
    engine.resize("host", 256 * 4096)
    arena = engine._tier.arena
    assert arena is not None
    assert ask(engine, SECOND).tokens and fake.registered == before
    with pytest.raises(CapacityError, match=r"pinned for the GPU.*cannot grow.*--host-memory"):
        engine.resize("host", (arena.pages + 1) * arena.page_stride)
    wait_idle(engine)
