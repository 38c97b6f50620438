"""Where a prompt parts from earlier ones, against a plain comparison token by token, and what is said about it."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from strata.engine.api import TokenSources
from strata.serve.divergence import MOST_PROMPTS, MOST_TOKENS, EarlierPrompts, Kept, compare, why


def kept(number: int, prompt: list[int], answer: list[int] | None = None, salt: str = "") -> Kept:
    return Kept(number, salt, np.array(prompt, np.uint32), answer or [])


def plainly_shared(one: list[int], other: list[int]) -> int:
    return next(
        (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def test_random_prompts_part_where_a_plain_comparison_says() -> None:
    draw = random.Random(7)
    for _ in range(200):
        stem = [draw.randrange(3) for _ in range(draw.choice([0, 5, 63, 64, 65, 400, 2000]))]
        earlier = []
        for number in range(draw.randrange(5)):
            whole = stem[: draw.randrange(len(stem) + 1)] + [
                draw.randrange(3) for _ in range(draw.randrange(100))
            ]
            asked = draw.randrange(len(whole) + 1)
            earlier.append(kept(number, whole[:asked], whole[asked:]))
        prompt = stem + [draw.randrange(3) for _ in range(draw.randrange(1, 50))]
        lengths = [plainly_shared(prompt, each.prompt.tolist() + each.answer) for each in earlier]
        found = compare(np.array(prompt, np.uint32), earlier)
        assert found.shared == max(lengths, default=0)
        assert found.compared == len(earlier)
        if found.shared:
            assert found.other == lengths.index(found.shared), "of equals, the first that is given"
        if found.excerpt is not None and found.other is not None:
            other = earlier[found.other].prompt.tolist() + earlier[found.other].answer
            assert list(found.excerpt.here) == prompt[found.shared : found.shared + 8]
            assert list(found.excerpt.there) == other[found.shared : found.shared + 8]
            assert found.excerpt.here[0] != found.excerpt.there[0]


def test_the_latest_of_equals_is_named_and_salts_never_meet() -> None:
    earlier = EarlierPrompts(excerpts=True)
    prompt = list(range(100))
    earlier.add(kept(1, prompt))
    earlier.add(kept(2, prompt))
    earlier.add(kept(3, prompt, salt="another tenant"))
    assert earlier.add(kept(4, prompt)).other == 2
    alone = earlier.add(kept(5, prompt, salt="a third"))
    assert alone.other is None and alone.compared == 0 and alone.excerpt is None


def test_an_answer_that_grew_since_is_compared_too() -> None:
    earlier, first = EarlierPrompts(excerpts=True), kept(1, [1, 2, 3])
    earlier.add(first)
    first.answer.extend([4, 5, 6])
    found = earlier.add(kept(2, [1, 2, 3, 4, 5, 9, 9]))
    assert (found.shared, found.other_prompt, found.other_length) == (5, 3, 6)
    assert found.excerpt is not None and found.excerpt.there == (6,)


def test_without_excerpts_no_token_is_remembered_beside_the_prompts() -> None:
    earlier = EarlierPrompts(excerpts=False)
    earlier.add(kept(1, [1, 2, 3]))
    assert earlier.add(kept(2, [1, 2, 4])).excerpt is None


def test_what_is_kept_is_bounded_in_prompts_and_in_tokens() -> None:
    earlier = EarlierPrompts(excerpts=False)
    for number in range(MOST_PROMPTS + 10):
        earlier.add(kept(number, [number]))
    assert earlier.add(kept(999, [1])).compared == MOST_PROMPTS
    for number in range(3):
        earlier.add(Kept(number, "", np.zeros(MOST_TOKENS - 1, np.uint32)))
    assert earlier.add(kept(1000, [5])).compared == 1, "the latest is kept, however long it is"


def test_many_long_prompts_are_compared_quickly() -> None:
    """100,000 tokens against 64 prompts that share nearly all: a worker's time, and little of it."""
    document = np.arange(60_000, dtype=np.uint32)
    earlier = [Kept(number, "", document.copy()) for number in range(64)]
    for number, each in enumerate(earlier):
        each.prompt[-1 - number] = 7
    prompt = document.copy()
    started = time.perf_counter()
    assert compare(prompt, earlier).shared == 59_999
    # About 2 ms on two busy cores. The bound is for a comparison in Python, which would take seconds.
    assert time.perf_counter() - started < 1.0


PAGE = 16


@pytest.mark.parametrize(
    ("cached", "prompt_tokens", "earlier", "sentence"),
    [
        (0, 16, [], "not longer than a page of 16 tokens"),
        (0, 100, [], "the first request of its salt"),
        (0, 100, [(6, [900, 901], [])], "the first to begin like this"),
        (96, 100, [(6, list(range(100)), [])], "all of it was cached"),
        (48, 100, [(6, [*range(50), 7, 7], [])], "diverged at token 50 from request 6"),
        (48, 100, [(6, list(range(40)), [*range(40, 50), 7])], "diverged at token 50 from the answer of request 6"),
        (0, 100, [(6, [0, 1, 2, 7], [])], "diverged at token 3 from request 6, within the first page"),
        (48, 100, [(6, list(range(50)), [])], "goes on where request 6 ended, at token 50"),
        (16, 100, [(6, [*range(50), 7], [])], "shares its first 50 tokens with request 6; 32 of these were evicted"),
        (64, 100, [(6, [*range(50), 7], [])], "matched 64 tokens of a request before this server started"),
        (64, 100, [], "matched 64 tokens of a request before this server started"),
    ],
)  # fmt: skip
def test_why(
    cached: int, prompt_tokens: int, earlier: list[tuple[int, list[int], list[int]]], sentence: str
) -> None:
    comparison = compare(np.arange(prompt_tokens, dtype=np.uint32), [kept(*each) for each in earlier])
    sources = TokenSources(host=cached, computed=prompt_tokens - cached)
    assert why(sources, PAGE, comparison).startswith(sentence)


def test_why_tells_forgotten_requests_from_those_of_another_server_and_names_a_flush() -> None:
    earlier, tokens = EarlierPrompts(excerpts=False), list(range(100))
    found = TokenSources(disk=64, computed=36)
    for number in range(MOST_PROMPTS):
        assert why(found, PAGE, earlier.add(kept(number, [1000 + number]))).endswith("this server started")
    assert why(found, PAGE, earlier.add(kept(100, tokens))).endswith("too long ago to compare with")
    missed = TokenSources(computed=100)
    assert "96 of these were evicted, " in why(missed, PAGE, earlier.add(kept(101, tokens)))
    earlier.flushed()
    assert "96 of these were flushed, evicted, " in why(missed, PAGE, earlier.add(kept(102, tokens)))
    assert "96 of these were evicted, " in why(missed, PAGE, earlier.add(kept(103, tokens)))
