"""The cache over all tiers against a model that only remembers what was committed. Whatever is matched, loaded,
reserved, committed, given back, evicted, restarted and damaged, in whatever order: a page that matches was committed
under that salt, and holds exactly its bytes. Where there is room for all and nothing is damaged, nothing is lost
either.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from tiered_pages import LAYERS, PAGE_SIZE, empty_pool, expected, page_bytes, read, write

from strata import Ticket, TieredCache, TieredMatch
from strata.errors import CapacityError, RequestError

DOCUMENTS, MOST_TOKENS, MOST_OPEN = 3, 18, 3
SALTS = ("", "tenant")


@dataclass(frozen=True)
class Sizes:
    """Pages of the pool and of host memory, bytes of disk, policies. `roomy`: nothing that was committed is lost."""

    device: int
    host: int
    disk: int
    policy: str

    @property
    def roomy(self) -> bool:
        return self.policy == "through" and self.host >= 200 and self.disk >= 1 << 20


@dataclass
class Open:
    """A match in use, with what it holds."""

    match: TieredMatch
    tokens: list[int]
    salt: str
    ticket: Ticket | None = None
    pages: list[int] = field(default_factory=list)
    reserved: list[int] = field(default_factory=list)


def document(number: int, length: int) -> list[int]:
    """Documents share their first three pages."""
    return [index if index < 3 * PAGE_SIZE else 100 * (number + 1) + index for index in range(length)]


class World:
    def __init__(self, sizes: Sizes, root: Path) -> None:
        self.sizes, self.root = sizes, root
        self.committed: set[tuple[str, tuple[int, ...]]] = set()
        self.damaged = False
        self.open: list[Open] = []
        self.start()

    def start(self) -> None:
        self.pool = empty_pool(self.sizes.device)
        self.cache = TieredCache(
            self.pool,
            PAGE_SIZE,
            host_memory=self.sizes.host * 4096,
            disk_path=self.root if self.sizes.disk else None,
            disk_capacity=self.sizes.disk,
            identity="model test",
            write_policy=self.sizes.policy,
            copy_threads=1,
            disk_threads=1,
            disk_engine="threads",
        )

    def lookup(self, number: int, length: int, salt: str) -> None:
        if len(self.open) == MOST_OPEN:
            return
        tokens = document(number, length)
        match = self.cache.match(tokens, salt)
        assert match.tokens == match.on_device + match.on_host + match.on_disk
        assert match.tokens == 0 or (salt, tuple(tokens[: match.tokens])) in self.committed
        if self.sizes.roomy and not self.damaged:
            ends = range(0, len(tokens) + 1, PAGE_SIZE)
            known = max(end for end in ends if end == 0 or (salt, tuple(tokens[:end])) in self.committed)
            assert match.tokens == known, "something that was committed is lost"
        self.open.append(Open(match, tokens, salt))

    def load(self, one: Open, limit: int) -> None:
        if one.ticket is not None or one.pages:
            return
        try:
            one.ticket = one.match.load(limit, timeout_s=20.0)
            one.pages = one.ticket.pages().tolist()
        except CapacityError:
            event("no room to load")
            self.release(one)
            return
        if one.match.on_device < one.match.tokens and one.pages:
            event("loaded from below")
        self.compare(one)

    def compare(self, one: Open) -> None:
        for layer in range(LAYERS):
            if one.ticket is not None:
                one.ticket.wait_layer(layer, 20.0)
            tokens = one.tokens[: len(one.pages) * PAGE_SIZE]
            np.testing.assert_array_equal(
                read(self.pool, one.pages, layer), expected(tokens, one.salt, layer)
            )

    def compute(self, one: Open, count: int, commits: bool) -> None:
        count = min(count, len(one.tokens) // PAGE_SIZE - len(one.pages))
        if count <= 0:
            return
        try:
            pages = one.match.reserve(count, timeout_s=0.0)
        except CapacityError:
            event("no room to compute")
            return
        if not commits:
            self.pool[:, :, pages] = np.nan
            one.match.abort(pages)
            return
        write(self.pool, one.tokens, one.salt, len(one.pages), pages)
        end = (len(one.pages) + count) * PAGE_SIZE
        one.match.commit(one.tokens[:end], pages)
        one.pages.extend(pages.tolist())
        for whole in range(PAGE_SIZE, end + 1, PAGE_SIZE):
            self.committed.add((one.salt, tuple(one.tokens[:whole])))
        if self.sizes.roomy:
            assert self.cache.settle()
        try:
            one.match.commit(one.tokens[:end], pages)
            raise AssertionError("committed twice")
        except RequestError:
            pass

    def release(self, one: Open) -> None:
        one.match.release()
        self.open.remove(one)

    def empty(self, tiers: tuple[str, ...], forget: bool) -> None:
        there = [tier for tier in tiers if self.cache.usage()[tier].capacity]
        if forget:
            self.cache.flush()
            self.damaged = True
        else:
            self.cache.demote(*there)

    def restart(self, damage: int | None) -> None:
        while self.open:
            self.release(self.open[0])
        self.cache.close()
        files = sorted(path for path in self.root.rglob("*") if path.is_file() and path.stat().st_size > 4096)
        if damage is not None and files:
            self.damaged = True
            event("damaged")
            path = files[damage % len(files)]
            with path.open("r+b") as file:
                file.seek(damage * 977 % path.stat().st_size)
                file.write(b"\xff" * 64)
        if not self.sizes.disk:
            self.committed.clear()
        self.start()

    def step(self, step: tuple[Any, ...]) -> None:
        what, *rest = step
        if what == "lookup":
            self.lookup(*rest)
        elif what in ("empty", "restart"):
            getattr(self, what)(*rest)
        elif self.open:
            index, *arguments = rest
            getattr(self, what)(self.open[index % len(self.open)], *arguments)

    def end(self) -> None:
        for one in self.open:
            self.compare(one)
        while self.open:
            self.release(self.open[0])
        assert self.cache.settle()
        assert self.cache.check(), "idle, yet something is held"
        self.cache.close()


def steps() -> st.SearchStrategy[list[tuple[Any, ...]]]:
    index = st.integers(0, MOST_OPEN - 1)
    # Most of it is about what was computed before, and lies lower by now.
    lookup = st.tuples(
        st.just("lookup"),
        st.integers(0, DOCUMENTS - 1),
        st.integers(1, MOST_TOKENS),
        st.sampled_from((*SALTS[:1] * 3, SALTS[1])),
    )
    load = st.tuples(st.just("load"), index, st.integers(0, MOST_TOKENS))
    compute = st.tuples(
        st.just("compute"), index, st.integers(1, 8), st.sampled_from((True, True, True, False))
    )
    release = st.tuples(st.just("release"), index)
    tiers = st.sampled_from((("device",), ("device",), ("device", "host"), ("host",)))
    empty = st.tuples(st.just("empty"), tiers, st.sampled_from((*(False,) * 6, True)))
    restart = st.tuples(st.just("restart"), st.one_of(st.none(), st.none(), st.integers(0, 1000)))
    some = [lookup] * 4 + [load] * 5 + [compute] * 2 + [release] * 3 + [empty] * 2 + [restart]
    return st.lists(st.one_of(some), min_size=30, max_size=50)


SIZES = st.builds(
    Sizes,
    device=st.integers(9, 24),
    host=st.sampled_from((0, *(4,) * 3, *(400,) * 4)),
    disk=st.sampled_from((0, 8 * page_bytes() + 65536, 8 << 20, 8 << 20)),
    policy=st.sampled_from(("through", "through", "selective", "back")),
)


def run(sizes: Sizes, steps: list[tuple[Any, ...]]) -> None:
    with tempfile.TemporaryDirectory() as root:
        world = World(sizes, Path(root))
        for number in range(DOCUMENTS):
            world.lookup(number, MOST_TOKENS, "")
            world.compute(world.open[0], MOST_TOKENS // PAGE_SIZE, True)
            world.release(world.open[0])
        for step in steps:
            world.step(step)
        world.end()


_SETTINGS: dict[str, Any] = {
    "deadline": None,
    "database": None,
    "suppress_health_check": [HealthCheck.too_slow],
}


@settings(max_examples=30, derandomize=True, **_SETTINGS)
@given(SIZES, steps())
def test_a_page_that_matches_holds_what_was_committed(sizes: Sizes, steps: list[tuple[Any, ...]]) -> None:
    run(sizes, steps)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@settings(max_examples=1000, **_SETTINGS)
@given(SIZES, steps())
def test_so_it_does_in_many_more_orders(sizes: Sizes, steps: list[tuple[Any, ...]]) -> None:
    run(sizes, steps)
