"""Aborts leave nothing behind: occupancy, pins and what is found again are as they were before."""

from __future__ import annotations

import random
import time
from collections import Counter

import pytest
from engine_harness import VOCABULARY, MakeEngine, Sizes, ask, assert_exact, read, wait_idle

from strata.engine import Engine, GenerationRequest, SamplingParams, ServedModel

PAGE = 4
DOCUMENTS = [[(17 * index + 3 * place + place * place) % 97 for place in range(60)] for index in range(6)]


def occupancy(engine: Engine) -> dict[str, float]:
    """Pages by tier and state."""
    stats = engine.stats()
    states = ("used", "resident", "pinned", "quarantined")
    return {
        f"{tier}_{state}": stats[f"{tier}_{state}_pages"]
        for tier in ("device", "host", "disk")
        for state in states
    }


def state_of(engine: Engine) -> str:
    """What the engine is at, as far as its counters tell."""
    stats = engine.stats()
    if stats["held"]:
        return "held for a prefetch"
    return next((name for name in ("transfers_in_flight", "waiting", "running") if stats[name]), "idle")


def bring_back(engine: Engine, served: ServedModel) -> None:
    """Every document in every tier."""
    for document in DOCUMENTS:
        assert_exact(served.model, document, ask(engine, document, 1))
    wait_idle(engine)


def abort_in_random_states(engine: Engine, generator: random.Random, aborts: int) -> Counter[str]:
    """Bursts of requests, each aborted at once, after a while, or after some tokens. Returns when they were."""
    states: Counter[str] = Counter()
    tiers = [["device"], ["device", "host"]] if engine.tiers()[1].enabled else [["device"]]
    done = 0
    while done < aborts:
        if generator.random() < 0.3:
            wait_idle(engine)
            engine.demote(generator.choice(tiers))
        streams = []
        for _ in range(min(generator.randint(1, 25), aborts - done)):
            tail = [generator.randrange(VOCABULARY) for _ in range(generator.randint(1, 20))]
            prompt = generator.choice(DOCUMENTS)[: generator.randint(8, 60)] + tail
            sampling = SamplingParams(max_tokens=generator.randint(2, 40))
            streams.append(engine.submit(GenerationRequest(prompt, sampling, cache_write=False)))
        generator.shuffle(streams)
        for stream in streams:
            way = generator.choice(["at once", "later", "amid its tokens"])
            if way == "later":
                time.sleep(generator.random() * 0.004)
            states[state_of(engine)] += 1
            answer = read(stream, 1 if way == "amid its tokens" else 0)
            done += answer.reason == "abort"
    return states


@pytest.mark.parametrize("aborts", [200, pytest.param(1000, marks=pytest.mark.soak)])
@pytest.mark.parametrize("host", [200, 0], ids=["three tiers", "staging"])
@pytest.mark.parametrize("prefetch", ["wait", "best_effort"])
def test_many_aborts(
    make_engine: MakeEngine, served: ServedModel, host: int, prefetch: str, aborts: int
) -> None:
    engine = make_engine(
        # Room for all documents and one request: nothing has to be evicted for good.
        sizes=Sizes(PAGE, 130, host, 4 << 20),
        prefetch_policy=prefetch,
        load_policy="always",
        max_running=3,
    )
    bring_back(engine, served)
    before = occupancy(engine)
    assert before["device_resident"] == before["disk_resident"] == 15 * len(DOCUMENTS)
    states = abort_in_random_states(engine, random.Random(1), aborts)
    wait_idle(engine)
    left, counted = occupancy(engine), engine.stats()
    bring_back(engine, served)
    grown = {name: value - counted.get(name, 0.0) for name, value in engine.stats().items()}
    assert occupancy(engine) == before, f"from {left}, by {grown}"
    stats = engine.stats()
    assert stats["aborted"] >= aborts * 0.9
    assert {"running", "waiting"} <= states.keys(), states
    assert stats["unknown_completions"] == stats["completions_lost"] == stats["disk_lost_completions"] == 0
