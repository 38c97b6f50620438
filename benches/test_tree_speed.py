"""Match and insert of the prefix tree, called from Python, beside memcmp of the same tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from strata._core import PageCache, same_bytes
from strata.bench.tree import cache_with, medians_us, random_tokens

CASES = pytest.mark.parametrize(
    ("page_size", "tokens"), [(16, 4096), (16, 131072), (1, 4096)], ids=lambda value: str(value)
)


@CASES
@pytest.mark.benchmark(group="tree")
def test_match(benchmark: Any, page_size: int, tokens: int) -> None:
    """A match of cached tokens: page table returned, touched, pinned, unpinned."""
    text = random_tokens(np.random.default_rng(0), tokens)
    cache = cache_with(text, page_size)
    query, copy = text.copy(), text.copy()
    found = benchmark(lambda: cache.lookup(query))
    assert len(found) == tokens // page_size
    match_us, memcmp_us = medians_us(51, [lambda: cache.lookup(query), lambda: same_bytes(query, copy)])
    benchmark.extra_info |= {"memcmp_us": memcmp_us, "match_over_memcmp": match_us / memcmp_us}


@CASES
@pytest.mark.benchmark(group="tree")
def test_insert(benchmark: Any, page_size: int, tokens: int) -> None:
    """The commit of new tokens into reserved pages, where an eviction has made room: memory is warm."""
    generator = np.random.default_rng(0)
    texts = [random_tokens(generator, tokens) for _ in range(16)]
    pages = tokens // page_size
    cache = PageCache(page_size, 4 * pages)
    turn = 0

    def reserve() -> tuple[tuple[Any, Any], dict[str, Any]]:
        nonlocal turn
        turn += 1
        return (texts[turn % len(texts)], cache.reserve(pages)), {}

    refused = benchmark.pedantic(cache.commit, setup=reserve, rounds=200, warmup_rounds=32)
    assert not refused
    copies = [text.copy() for text in texts]
    (memcmp_us,) = medians_us(51, [lambda: same_bytes(texts[0], copies[0])])
    benchmark.extra_info |= {
        "memcmp_us": memcmp_us,
        "insert_over_memcmp": 1e6 * benchmark.stats.stats.median / memcmp_us,
    }
