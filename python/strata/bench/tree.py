"""The prefix tree's production match and insert, called from Python as an engine calls them.

A match returns the page table, counts an access, pins the pages and lets them go again
(`PageCache.lookup`). An insert is the commit of new tokens into pages that are reserved already. Beside
each stand a memcmp and a memcpy of the same tokens, called the same way. Every number is a median over
blocks of calls that take turns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from strata._core import PageCache, copy_bytes, same_bytes
from strata.bench.report import (
    JSON_HELP,
    Bound,
    bounds_table,
    check_json_path,
    emit,
    median,
    progress_steps,
    table_of,
)
from strata.bench.settings import manifest
from strata.errors import ConfigError, StorageError

Tokens = npt.NDArray[np.uint32]

PAGE_SIZES = (16, 1)
LENGTHS = (4096, 131072)
GROWTH_TOKENS = (10_000, 1_000_000)
GROWTH_QUERY = 4096
VOCABULARY = 50_000
BLOCK_S = 0.0005
"""A block of calls lasts about this long, so that reading the clock does not count."""
FRESH_DOCUMENTS = 16
RESIDENT_DOCUMENTS = 4
"""Inserts run in a cache that holds this many documents and evicts the oldest for the next."""
WARM_MEMORY = (
    "insert_us is the commit of new tokens where an evicted document made room: its memory has been used "
    "before, so first-touch page faults are left out"
)


def random_tokens(generator: np.random.Generator, count: int) -> Tokens:
    """Token ids of a text that shares nothing with another."""
    return generator.integers(0, VOCABULARY, count, dtype=np.uint32)


def cache_with(tokens: Tokens, page_size: int, spare_tokens: int = 0) -> PageCache:
    """A cache that holds the whole pages of `tokens` and has room for `spare_tokens` more."""
    cache = PageCache(page_size, (len(tokens) + spare_tokens) // page_size)
    insert(cache, tokens)
    return cache


def insert(cache: PageCache, tokens: Tokens) -> None:
    """Makes the whole pages of `tokens` match."""
    cache.commit(tokens, cache.reserve(len(tokens) // cache.page_size))


def medians_us(rounds: int, works: Sequence[Callable[[], object]]) -> list[float]:
    """Microseconds a call of each work: medians over `rounds` blocks of calls; the works take turns by
    block.
    """
    repeats = [_calls_in_a_block(work) for work in works]
    spans: list[list[float]] = [[] for _ in works]
    for _ in range(rounds):
        for work, repeat, found in zip(works, repeats, spans, strict=True):
            start = time.perf_counter_ns()
            for _ in range(repeat):
                work()
            found.append((time.perf_counter_ns() - start) / repeat / 1e3)
    return [median(found) for found in spans]


def _calls_in_a_block(work: Callable[[], object]) -> int:
    work()
    start = time.perf_counter()
    for _ in range(8):
        work()
    return max(1, int(BLOCK_S * 8 / (time.perf_counter() - start)))


def match_row(page_size: int, length: int, rounds: int, generator: np.random.Generator) -> dict[str, Any]:
    """One row of the result: match, insert, memcmp and memcpy of `length` tokens, in microseconds."""
    tokens = random_tokens(generator, length)
    cache = cache_with(tokens, page_size)
    query, copy, target = tokens.copy(), tokens.copy(), np.empty(4 * length, dtype=np.uint8)
    found = len(cache.lookup(query))
    if found != length // page_size:
        raise StorageError(f"a match of {length} cached tokens found {found} of {length // page_size} pages")
    source = query.view(np.uint8)
    match_us, memcmp_us, memcpy_us = medians_us(
        rounds,
        [
            lambda: cache.lookup(query),
            lambda: same_bytes(query, copy),
            lambda: copy_bytes(target, source, False),
        ],
    )
    cache.check()
    return {
        "page_size": page_size,
        "tokens": length,
        "match_us": match_us,
        "insert_us": insert_us(page_size, length, rounds, generator),
        "memcmp_us": memcmp_us,
        "memcpy_us": memcpy_us,
    }


def insert_us(page_size: int, length: int, rounds: int, generator: np.random.Generator) -> float:
    """Median microseconds of committing `length` new tokens into reserved pages; see `WARM_MEMORY`."""
    fresh = [random_tokens(generator, length) for _ in range(FRESH_DOCUMENTS)]
    pages = length // page_size
    cache = PageCache(page_size, RESIDENT_DOCUMENTS * pages)
    spans: list[float] = []
    warm_up = 2 * FRESH_DOCUMENTS
    for turn in range(warm_up + max(rounds, FRESH_DOCUMENTS)):
        tokens = fresh[turn % FRESH_DOCUMENTS]
        reserved = cache.reserve(pages)
        start = time.perf_counter_ns()
        refused = cache.commit(tokens, reserved)
        span = time.perf_counter_ns() - start
        if refused:
            raise StorageError(f"{len(refused)} pages of a new document were cached already")
        if turn >= warm_up:
            spans.append(span / 1e3)
    cache.check()
    return median(spans)


def growth_row(page_size: int, rounds: int, generator: np.random.Generator) -> dict[str, Any]:
    """Match of `GROWTH_QUERY` tokens in trees of different sizes: the same query again and again, and
    every document in turn, whose tokens and nodes the caches of the processor have lost by then.
    """
    hot: list[Callable[[], object]] = []
    turning: list[Callable[[], object]] = []
    for total in GROWTH_TOKENS:
        documents = [random_tokens(generator, GROWTH_QUERY) for _ in range(max(1, total // GROWTH_QUERY))]
        cache = PageCache(page_size, len(documents) * GROWTH_QUERY // page_size)
        for document in documents:
            insert(cache, document)
        hot.append(_looker(cache, documents[-1:]))
        turning.append(_looker(cache, documents))
    found = medians_us(rounds, [*hot, *turning])
    sizes = len(GROWTH_TOKENS)
    return {
        "page_size": page_size,
        "tokens": GROWTH_QUERY,
        "tree_tokens": list(GROWTH_TOKENS),
        "match_us": found[:sizes],
        "match_in_turn_us": found[sizes:],
    }


def _looker(cache: PageCache, documents: Sequence[Tokens]) -> Callable[[], object]:
    """Matches one document after the other, a call each."""
    turn = 0

    def look() -> object:
        nonlocal turn
        turn = (turn + 1) % len(documents)
        return cache.lookup(documents[turn])

    return look


def bounds_of(rows: Sequence[dict[str, Any]], growth: Sequence[dict[str, Any]]) -> list[Bound]:
    """What page size 16 promises."""
    bounds: list[Bound] = []
    for row in rows:
        if row["page_size"] != 16:
            continue
        if row["tokens"] == 4096:
            bounds.append(Bound("match of 4,096", row["match_us"], 5.0, "us", "5 us"))
            bounds.append(Bound("insert of 4,096", row["insert_us"], 10.0, "us", "10 us"))
        if row["tokens"] == 131072:
            most = 2.5 * row["memcmp_us"] + 5
            bounds.append(Bound("match of 131,072", row["match_us"], most, "us", "2.5 x memcmp + 5 us"))
    for row in growth:
        if row["page_size"] == 16:
            small, large = row["match_us"][0], row["match_us"][-1]
            rule = "match of 4,096 in a tree of 10k tokens + 10% for noise"
            bounds.append(Bound("match in a tree of 1M", large, 1.1 * small, "us", rule))
    return bounds


def measure(rounds: int, seed: int) -> dict[str, Any]:
    """All rows and bounds, with a progress bar."""
    generator = np.random.default_rng(seed)
    cases = [(page_size, length) for page_size in PAGE_SIZES for length in LENGTHS]
    rows: list[dict[str, Any]] = []
    growth: list[dict[str, Any]] = []
    with progress_steps(len(cases) + len(PAGE_SIZES)) as steps:
        for page_size, length in cases:
            steps.next(f"page size {page_size}, {length:,} tokens")
            rows.append(match_row(page_size, length, rounds, generator))
        for page_size in PAGE_SIZES:
            steps.next(f"page size {page_size}, growth of the tree")
            growth.append(growth_row(page_size, rounds, generator))
    bounds = bounds_of(rows, growth)
    return {
        "rows": rows,
        "growth": growth,
        "bounds": [bound.as_json() for bound in bounds],
        "notes": [WARM_MEMORY],
    }


def main(arguments: Sequence[str], program: str = "python -m strata.bench tree") -> int:
    """Measures and reports. Returns 0; raises StrataError."""
    parser = argparse.ArgumentParser(
        prog=program,
        allow_abbrev=False,
        description="Match and insert of the prefix tree, called from Python, beside memcmp and memcpy.",
    )
    parser.add_argument(
        "--rounds", type=int, default=301, help="blocks of calls; results are medians (default: 301)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random tokens (default: 0)")
    parser.add_argument("--json", metavar="FILE", help=JSON_HELP)
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        raise ConfigError(f"--rounds {options.rounds} is too small; give at least 1")
    check_json_path(options.json)
    facts = manifest(program, options.seed, arguments=list(arguments), rounds=options.rounds)
    result = {**measure(options.rounds, options.seed), "manifest": facts}
    emit(result, _tables(result), options.json)
    return 0


def _tables(result: dict[str, Any]) -> list[Any]:
    numbers = ("match_us", "insert_us", "memcmp_us", "memcpy_us")
    rows = [
        (f"page size {row['page_size']}, {row['tokens']:,} tokens", *(f"{row[name]:.2f}" for name in numbers))
        for row in result["rows"]
    ]
    growth = [
        (
            f"page size {row['page_size']}, tree of {size:,} tokens",
            f"{row['match_us'][index]:.2f}",
            f"{row['match_in_turn_us'][index]:.2f}",
        )
        for row in result["growth"]
        for index, size in enumerate(row["tree_tokens"])
    ]
    bounds = [
        Bound(bound["name"], bound["value"], bound["bound"], bound["unit"], bound["rule"])
        for bound in result["bounds"]
    ]
    return [
        table_of("microseconds a call, medians", ("what", "match", "insert", "memcmp", "memcpy"), rows),
        table_of(f"match of {GROWTH_QUERY:,} tokens", ("what", "same query", "each in turn"), growth),
        bounds_table(bounds),
        WARM_MEMORY,
    ]
