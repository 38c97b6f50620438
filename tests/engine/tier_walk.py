"""A prompt's way through the tiers of a living engine: each answer from the tier that is left, each token the same."""

from __future__ import annotations

from collections.abc import Sequence

from engine_harness import VOCABULARY, Answer, ask, assert_exact, nonzero, read, wait_idle

from strata.engine import Engine, GenerationRequest, SamplingParams
from strata.models import CausalLM

MAX_RUNNING = 4
"""What engines of these tests are started with, so that a request can be made to wait."""
PAGES = 2
"""Whole pages of the prompt that walks: few enough for the smallest tier."""


def enabled(engine: Engine) -> list[str]:
    """The tiers that are on."""
    return [report.name for report in engine.tiers() if report.enabled]


def ask_behind_others(engine: Engine, prompt: Sequence[int]) -> Answer:
    """One request that has to wait for its turn, so that whatever prefetches has time to. The others keep nothing."""
    sampling = SamplingParams(max_tokens=24)
    others = [
        engine.submit(GenerationRequest([1 + index, 2, 3], sampling, cache_write=False))
        for index in range(MAX_RUNNING)
    ]
    answer = ask(engine, prompt)
    for other in others:
        read(other)
    return answer


def walk(engine: Engine, model: CausalLM, seed: int) -> None:
    """Finds a new prompt on the device, then on the host, then on disk, as far as there are such tiers.

    Where a policy may compute instead, that it did has to be counted. Tiers that others have filled should be flushed
    before: what has no room below stays.
    """
    page = engine.config.cache.page_size
    prompt = [(seed * 31 + place * place + 5 * place) % VOCABULARY for place in range(PAGES * page + 1)]
    cold = ask(engine, prompt)
    assert_exact(model, prompt, cold)
    tiers = enabled(engine)
    for index, tier in enumerate(tiers):
        wait_idle(engine)
        if index:
            engine.demote(tiers[:index])
        before = engine.stats()
        answer = ask_behind_others(engine, prompt)
        assert answer.tokens == cold.tokens, f"another answer from {tier}"
        instead = {
            name: engine.stats()[name] - before[name]
            for name in ("recomputed_tokens_host", "recomputed_tokens_disk")
        }
        found = dict(zip(("device", "host", "disk", "computed"), answer.sources, strict=True))
        came = found[tier] == PAGES * page and found["computed"] == 1
        assert came or (found["computed"] > 1 and sum(instead.values()) > 0), (
            f"{tier}: {found}, {instead}, {nonzero(engine)}"
        )
    wait_idle(engine)
