"""The engine with its transfers on a device of its own: the whole road of `--device cuda`, on a fake device and a tiny
model that computes on the host.
"""

from __future__ import annotations

import pytest
from engine_harness import MakeEngine, Sizes, ask, assert_exact, eventually, nonzero, wait_idle
from pressure import Load, assert_clean, device_pages, run_clients

from strata.device.fake_cuda import FakeCudaRuntime
from strata.engine import Engine, ServedModel
from strata.errors import ConfigError

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


def test_a_slow_link_cannot_be_emulated(make_engine: MakeEngine) -> None:
    with pytest.raises(ConfigError, match="--copy-bandwidth"):
        make_engine(cuda=FakeCudaRuntime(), copy_bandwidth=1_000_000)


def lost(engine: Engine) -> bool:
    """Whether the operator is told."""
    return any("host and device" in problem for problem in engine.health().problems)


def test_a_lost_device_is_said_and_whatever_ran_on_it_ends(
    make_engine: MakeEngine, served: ServedModel
) -> None:
    fake = FakeCudaRuntime(4)
    engine = make_engine(cuda=fake)
    ask(engine, FIRST)
    wait_idle(engine)
    engine.demote(["device"])
    fake.fail_next("query", 1)
    with pytest.raises(Exception, match=r"failed|step"):
        # The fake's compute stream is lost with it, as a GPU's would be.
        ask(engine, FIRST)
    assert eventually(lambda: lost(engine))
    wait_idle(engine)
    engine.shutdown(drain_s=0.0, demote_s=0.0)


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
    assert ask(engine, SECOND).tokens and fake.registered == before
    wait_idle(engine)
