"""Layers start before the layers above them are loaded; copies that lose their reader harm nobody."""

from __future__ import annotations

import threading

import pytest
import torch
from engine_harness import MakeEngine, Sizes, WatchedModel, ask, assert_exact, eventually, read, wait_idle
from pressure import Load, run_clients

from strata._core import LayerHold
from strata.engine import GenerationRequest, SamplingParams, ServedModel

HELD_S = 30.0
"""Far longer than a test waits for: a hold is always released."""
FIRST = [(3 * place) % 89 for place in range(41)]
SECOND = [(5 * place + 1) % 89 for place in range(33)]


@pytest.mark.parametrize("layer", [1, 2])
def test_layers_below_a_delayed_one_run_first(make_engine: MakeEngine, layer: int) -> None:
    watched, hold = WatchedModel(), LayerHold("load", layer, HELD_S)
    engine = make_engine(served=watched.served, hold=hold)
    cold = ask(engine, FIRST)
    wait_idle(engine)
    engine.demote(["device"])
    watched.events.clear()
    stream = engine.submit(GenerationRequest(FIRST, SamplingParams(max_tokens=8)))
    assert hold.wait_until_held(HELD_S)
    assert eventually(lambda: ("wanted", layer) in watched.events)
    below = [event for lower in range(layer) for event in (("wanted", lower), ("had", lower))]
    assert watched.events == [*below, ("wanted", layer)], "the forward went past a layer that is not loaded"
    hold.release()
    warm = read(stream)
    assert warm.tokens == cold.tokens
    assert warm.sources == (0, 40, 0, 1)
    wait_idle(engine)


def test_an_abort_amid_a_load_changes_nobodys_bytes(make_engine: MakeEngine) -> None:
    watched, hold = WatchedModel(), LayerHold("load", 1, HELD_S)
    engine = make_engine(served=watched.served, hold=hold)
    pool = engine._pool.tensor
    first = ask(engine, FIRST)
    wait_idle(engine)
    engine.demote(["device"])
    second = ask(engine, SECOND)
    wait_idle(engine)
    pages = watched.pages[len(SECOND) + 7]
    before = pool[:, :, pages].clone()
    loading = engine.submit(GenerationRequest(FIRST, SamplingParams(max_tokens=8)))
    assert hold.wait_until_held(HELD_S)
    joined = engine.submit(GenerationRequest(FIRST, SamplingParams(max_tokens=8)))
    loading.abort()
    assert read(loading).reason == "abort"
    assert torch.equal(pool[:, :, pages], before)
    hold.release()
    assert read(joined).tokens == first.tokens
    wait_idle(engine)
    assert torch.equal(pool[:, :, pages], before), "the copy wrote to pages of another request"
    again = ask(engine, SECOND)
    assert again.tokens == second.tokens and again.sources == (32, 0, 0, 1)
    assert ask(engine, FIRST).tokens == first.tokens


def test_everyone_aborts_amid_a_load_and_the_pages_come_back(make_engine: MakeEngine) -> None:
    watched, hold = WatchedModel(), LayerHold("load", 1, HELD_S)
    engine = make_engine(served=watched.served, hold=hold, sizes=Sizes(device=14))
    first = ask(engine, FIRST)
    wait_idle(engine)
    engine.demote(["device"])
    streams = [engine.submit(GenerationRequest(FIRST, SamplingParams(max_tokens=8))) for _ in range(5)]
    assert hold.wait_until_held(HELD_S)
    for stream in streams:
        stream.abort()
        stream.abort()
    assert [read(stream).reason for stream in streams] == ["abort"] * 5
    waiting = engine.submit(GenerationRequest(SECOND, SamplingParams(max_tokens=8)))
    hold.release()
    assert_exact(watched.model, SECOND, read(waiting))
    wait_idle(engine)
    assert ask(engine, FIRST).tokens == first.tokens
    wait_idle(engine)


def test_an_abort_amid_a_backup_keeps_what_it_reads(make_engine: MakeEngine) -> None:
    watched, hold = WatchedModel(), LayerHold("backup", 1, HELD_S)
    engine = make_engine(served=watched.served, hold=hold, sizes=Sizes(device=24, host=40))
    aborted = engine.submit(GenerationRequest(FIRST, SamplingParams(max_tokens=40)))
    assert hold.wait_until_held(HELD_S)
    aborted.abort()
    assert read(aborted).reason == "abort"
    pages = watched.pages[len(FIRST)][:10]
    before = engine._pool.tensor[:, :, pages].clone()
    # Room for this one is there, besides the pages that the backup reads; it runs while the copy is held.
    assert_exact(watched.model, SECOND, ask(engine, SECOND, max_tokens=4))
    # For this one there is not: it waits for the copy.
    third = [(11 * place + 2) % 89 for place in range(70)]
    stream = engine.submit(GenerationRequest(third, SamplingParams(max_tokens=4)))
    assert torch.equal(engine._pool.tensor[:, :, pages], before), "a page that a backup reads was overwritten"
    hold.release()
    assert_exact(watched.model, third, read(stream))
    wait_idle(engine)
    engine.demote(["device"])
    answer = ask(engine, FIRST)
    assert answer.sources[1] > 0
    assert_exact(watched.model, FIRST, answer)


def test_eight_requests_share_their_forwards(make_engine: MakeEngine) -> None:
    watched = WatchedModel()
    gate = threading.Event()
    watched.before = lambda batch: None if gate.wait(HELD_S) else pytest.fail("the gate stayed shut")
    engine = make_engine(served=watched.served)
    prompts = [[index, *range(20 + index)] for index in range(8)]
    streams = [engine.submit(GenerationRequest(prompt, SamplingParams(max_tokens=24))) for prompt in prompts]
    gate.set()
    for prompt, stream in zip(prompts, streams, strict=True):
        assert_exact(watched.model, prompt, read(stream))
    stats = engine.stats()
    # 8 x 23 tokens after the first ones; a plan may have been formed before all had arrived.
    assert stats["decode_forwards"] <= 2 * 23
    assert stats["prefill_forwards"] <= 3
    assert stats["prefill_forwards"] + stats["decode_forwards"] == watched.forwards


def test_a_flush_waits_for_copies_under_way(make_engine: MakeEngine) -> None:
    """What no request uses is forgotten, also if a copy reads it at the moment."""
    hold = LayerHold("backup", 0, HELD_S)
    engine = make_engine(hold=hold)
    ask(engine, FIRST)
    assert hold.wait_until_held(HELD_S)
    threading.Timer(0.2, hold.release).start()
    engine.flush(HELD_S)
    wait_idle(engine)
    left = {tier: engine.stats()[f"{tier}_resident_pages"] for tier in ("device", "host", "disk")}
    assert left == {"device": 0, "host": 0, "disk": 0}


def test_a_load_that_is_too_late_becomes_a_recompute(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched, hold = WatchedModel(), LayerHold("load", 1, HELD_S)
    engine = make_engine(served=watched.served, hold=hold)
    first, second = ask(engine, FIRST), ask(engine, SECOND)
    wait_idle(engine)
    engine.demote(["device"])
    monkeypatch.setattr("strata.engine.step.LOAD_TIMEOUT_S", 0.05)
    late = ask(engine, FIRST)
    assert late.tokens == first.tokens and late.reason == "length"
    stats = engine.stats()
    assert stats["plans_discarded"] > 0
    assert late.sources == (0, 0, 0, 41), "nothing of this prompt came from a tier in the end"
    hold.release()
    monkeypatch.undo()
    wait_idle(engine)
    assert ask(engine, SECOND).tokens == second.tokens
    assert ask(engine, FIRST).sources == (40, 0, 0, 1)
    wait_idle(engine)


@pytest.mark.parametrize("outstanding_plans", [1, 2])
def test_loads_that_fail_amid_others(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, served: ServedModel, outstanding_plans: int
) -> None:
    """A slow link and no patience: steps are thrown away all the time, and no token is wrong."""
    monkeypatch.setattr("strata.engine.step.LOAD_TIMEOUT_S", 0.001)
    load = Load(5, clients=32, documents=12, document_tokens=(30, 90), turns=2, pause_s=0.3)
    engine = make_engine(
        sizes=Sizes(4, int(load.longest * 2.5) // 4, 400, 4 << 20),
        copy_bandwidth=1_000_000,
        policy="fcfs",  # others hide loads behind decode steps
        load_policy="always",
        outstanding_plans=outstanding_plans,
    )
    outcome = run_clients(engine, served.model, load)
    assert not outcome.stuck and not outcome.errors and not outcome.wrong, outcome
    wait_idle(engine)
    stats = engine.stats()
    assert stats["plans_discarded"] > 0 and stats["load_cancelled"] > 0
    assert stats["unknown_completions"] == stats["completions_lost"] == 0
