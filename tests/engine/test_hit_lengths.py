"""Prompts around page borders, hits of every length, from every tier."""

from __future__ import annotations

import pytest
from engine_harness import MakeEngine, Sizes, ask, assert_exact, wait_idle

from strata.engine import Engine, ServedModel

OTHER = 50


def prepare(engine: Engine, tier: str) -> None:
    """Leaves what is cached in `tier` alone."""
    wait_idle(engine)
    above = {"device": [], "host": ["device"], "disk": ["device", "host"]}[tier]
    if above:
        engine.demote(above)


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
@pytest.mark.parametrize(("page", "outstanding_plans"), [(1, 2), (4, 1), (4, 2), (16, 2)])
def test_hits(
    make_engine: MakeEngine, served: ServedModel, page: int, tier: str, outstanding_plans: int
) -> None:
    engine = make_engine(sizes=Sizes(page, 600, 600, 8 << 20), outstanding_plans=outstanding_plans)
    for pages in range(1, 5):
        for length in {pages * page - 1, pages * page, pages * page + 1} - {0}:
            for hit in range(4):
                wait_idle(engine)
                engine.flush()
                prompt = [(place * 7 + pages) % OTHER for place in range(length)]
                cached = prompt[: hit * page]
                if cached:
                    # What is cached ends in a token that no prompt has, so that exactly `hit` pages are shared.
                    assert_exact(served.model, [*cached, 96], ask(engine, [*cached, 96], max_tokens=1))
                prepare(engine, tier)
                answer = ask(engine, prompt, max_tokens=page + 2)
                assert_exact(served.model, prompt, answer)
                shared = min(len(cached) // page, (length - 1) // page) * page
                place = ("device", "host", "disk").index(tier)
                due = [0, 0, 0, length - shared]
                due[place] = shared
                assert answer.sources == tuple(due), (
                    f"{length} tokens, {hit} pages of {page} cached in {tier}"
                )
    wait_idle(engine)


@pytest.mark.parametrize("page", [1, 4, 16])
def test_a_conversation_reuses_every_turn(make_engine: MakeEngine, served: ServedModel, page: int) -> None:
    engine = make_engine(sizes=Sizes(page, 600, 600, 8 << 20))
    prompt = [3, 1, 4, 1, 5]
    for turn in range(10):
        before = len(prompt)
        answer = ask(engine, prompt, max_tokens=9)
        assert_exact(served.model, prompt, answer)
        if turn:
            # The last token of an answer is never computed from, so its page may be missing.
            assert sum(answer.sources[:3]) >= (before - 3 - 1) // page * page
        prompt = [*prompt, *answer.tokens, turn, 96]
    wait_idle(engine)


def test_salts_never_share(make_engine: MakeEngine, served: ServedModel) -> None:
    engine = make_engine()
    prompt = list(range(41))
    for salt in ("", "a", "b", "a\0", "ab"):
        answer = ask(engine, prompt, salt=salt)
        assert answer.sources == (0, 0, 0, 41), f"salt {salt!r} hit another's pages"
        assert_exact(served.model, prompt, answer)
    for tiers in ([], ["device"], ["device", "host"]):
        if tiers:
            engine.demote(tiers)
        assert ask(engine, prompt, salt="c" * (len(tiers) + 1)).sources == (0, 0, 0, 41)
        assert sum(ask(engine, prompt, salt="a").sources[:3]) == 40
    engine.shutdown(drain_s=1.0, demote_s=5.0)
    again = make_engine()
    assert ask(again, prompt, salt="d").sources == (0, 0, 0, 41)
    assert ask(again, prompt, salt="ab").sources == (0, 0, 40, 1)
