"""The cache over all tiers as a foreign engine uses it: bytes come back from each tier, wrong use is refused in
words."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiered_pages import LAYERS, PAGE_SIZE, empty_pool, expected, read, write

import strata
from strata._core import LayerHold
from strata.cache.tiers import move_to_disk
from strata.errors import CapacityError, ConfigError, LoadFailedError, RequestError, StrataError

PROMPT = list(range(100, 112))
PAGES = len(PROMPT) // PAGE_SIZE


def open_cache(pool: Any, **settings: Any) -> strata.TieredCache:
    return strata.TieredCache(pool, PAGE_SIZE, **({"host_memory": "1MiB"} | settings))


def compute(cache: strata.TieredCache, pool: Any, tokens: list[int], salt: str = "") -> list[int]:
    """What an engine does with a prompt that is not cached. Returns its pages."""
    with cache.match(tokens, salt) as match:
        pages = match.reserve(len(tokens) // PAGE_SIZE)
        write(pool, tokens, salt, 0, pages)
        match.commit(tokens, pages)
        return pages.tolist()


def assert_comes_back(cache: strata.TieredCache, pool: Any, tokens: list[int], salt: str = "") -> None:
    with cache.match(tokens, salt) as match:
        ticket = match.load()
        for layer in range(LAYERS):
            ticket.wait_layer(layer, 10.0)
            found = read(pool, ticket.pages(), layer)
            np.testing.assert_array_equal(found, expected(tokens[: ticket.tokens], salt, layer))
        assert ticket.tokens == len(tokens) // PAGE_SIZE * PAGE_SIZE
        assert ticket.done()


def places(match: strata.TieredMatch) -> tuple[int, int, int]:
    return match.on_device, match.on_host, match.on_disk


def test_a_prompt_comes_back_from_each_tier(tmp_path: Path) -> None:
    pool = empty_pool(16)
    settings = {"disk_path": tmp_path / "kv", "disk_capacity": "64MiB", "identity": "weights"}
    with open_cache(pool, **settings) as cache:
        with cache.match(PROMPT) as match:
            assert match.tokens == 0
        compute(cache, pool, PROMPT)
        with cache.match(PROMPT) as match:
            assert places(match) == (len(PROMPT), 0, 0)
        assert_comes_back(cache, pool, PROMPT)
        assert cache.demote("device")["device_dropped"] == PAGES
        pool[:] = np.nan
        with cache.match(PROMPT) as match:
            assert places(match) == (0, len(PROMPT), 0)
        assert_comes_back(cache, pool, PROMPT)
        cache.demote("device", "host")
        pool[:] = np.nan
        with cache.match(PROMPT) as match:
            assert places(match) == (0, 0, len(PROMPT))
            assert match.load_s is None or match.load_s >= 0.0
        assert_comes_back(cache, pool, PROMPT)
        assert cache.settle() and cache.check()
    restarted = empty_pool(9)
    with open_cache(restarted, **settings) as cache:
        with cache.match(PROMPT) as match:
            assert places(match) == (0, 0, len(PROMPT))
        assert_comes_back(cache, restarted, PROMPT)
        assert cache.flush()["disk_dropped"] == PAGES
        with cache.match(PROMPT) as match:
            assert match.tokens == 0
    with open_cache(empty_pool(9), **(settings | {"identity": "other weights"})) as cache:
        compute(cache, cache.pool.owner, PROMPT)
    with open_cache(restarted, **settings) as cache, cache.match(PROMPT) as match:
        assert match.tokens == 0


def test_a_torch_pool_and_two_salts() -> None:
    tensor = torch.zeros(empty_pool(8).shape, dtype=torch.float64)
    with open_cache(tensor) as cache:
        compute(cache, tensor.numpy(), PROMPT, "one")
        with cache.match(PROMPT, "two") as match:
            assert match.tokens == 0
        cache.demote("device")
        tensor.fill_(-1.0)
        assert_comes_back(cache, tensor.numpy(), PROMPT, "one")


def test_layers_are_ready_one_after_the_other() -> None:
    pool, hold = empty_pool(16), LayerHold("load", 1, 20.0)
    with open_cache(pool, hold=hold) as cache:
        compute(cache, pool, PROMPT)
        cache.demote("device")
        match = cache.match(PROMPT)
        ticket = match.load()
        ticket.wait_layer(0, 10.0)
        assert not ticket.done()
        fresh = match.reserve(1)
        with pytest.raises(RequestError, match="load is not over"):
            match.commit([*PROMPT, 1, 2], fresh)
        with pytest.raises(LoadFailedError, match="layer 1 was not loaded") as failure:
            ticket.wait_layer(1, 0.01)
        assert failure.value.late
        hold.release()
        ticket.wait(10.0)
        write(pool, [*PROMPT, 1, 2], "", PAGES, fresh)
        assert match.commit([*PROMPT, 1, 2], fresh) == []
        match.release()
        assert_comes_back(cache, pool, [*PROMPT, 1, 2])


def test_a_cancelled_load_is_never_seen_and_costs_nothing() -> None:
    pool, hold = empty_pool(PAGES), LayerHold("load", 1, 20.0)
    with open_cache(pool, hold=hold) as cache:
        compute(cache, pool, PROMPT)
        cache.demote("device")
        ticket = cache.match(PROMPT).load()
        ticket.wait_layer(0, 10.0)
        ticket.cancel()
        with pytest.raises(LoadFailedError, match="its transfer failed"):
            ticket.wait(10.0)
        hold.release()
        assert cache.settle() and cache.check()
        assert_comes_back(cache, pool, PROMPT)


def test_matches_keep_their_pages_and_share_them() -> None:
    pool = empty_pool(PAGES + 1)
    with open_cache(pool, host_memory=0) as cache:
        pages = compute(cache, pool, PROMPT)
        with cache.match(PROMPT) as one, cache.match(PROMPT[:6]) as two:
            assert one.load().pages().tolist() == pages
            assert two.load().pages().tolist() == pages[:3]
            assert two.load is not None and two.tokens == 6
            with pytest.raises(CapacityError, match="no room on the device for 2 pages"):
                one.reserve(2)
            with pytest.raises(CapacityError, match="can never fit the pool of 7"):
                one.reserve(8)
        usage = cache.usage()["device"]
        assert (usage.capacity, usage.cached, usage.pinned) == (PAGES + 1, PAGES, 0)
        assert cache.usage()["host"].capacity == 0 or cache.usage()["host"].cached == 0


def test_a_reservation_waits_for_room() -> None:
    pool = empty_pool(PAGES)
    with open_cache(pool, host_memory=0) as cache:
        compute(cache, pool, PROMPT)
        held = cache.match(PROMPT)
        timer = threading.Timer(0.1, held.release)
        with cache.match([1, 2]) as match:
            timer.start()
            assert len(match.reserve(PAGES, timeout_s=20.0)) == PAGES
        timer.join()


def test_a_wait_for_copies_to_lower_tiers_is_no_refusal() -> None:
    pool, hold = empty_pool(PAGES), LayerHold("backup", 1, 1.0)
    with open_cache(pool, write_policy="back", hold=hold) as cache:
        compute(cache, pool, PROMPT)
        with cache.match([1, 2]) as match:
            with pytest.raises(CapacityError, match="can never fit"):
                match.reserve(PAGES + 1)
            threading.Timer(0.05, hold.release).start()
            # Its victims are on their way down, which is all the room that it needs.
            assert len(match.reserve(PAGES)) == PAGES
        with cache.match(PROMPT) as match:
            assert places(match) == (0, len(PROMPT), 0)


def test_a_match_that_had_no_room_to_load_loads_again_or_computes() -> None:
    pool = empty_pool(PAGES)
    with open_cache(pool) as cache:
        compute(cache, pool, PROMPT)
        cache.demote("device")
        loads, computes, others = cache.match(PROMPT), cache.match(PROMPT), cache.match([1, 2])
        others.reserve(PAGES)
        for match in (loads, computes):
            ticket = match.load(timeout_s=0.0)
            with pytest.raises(CapacityError, match=f"no room on the device for {PAGES} cached pages"):
                ticket.pages(10.0)
        others.release()
        pages = computes.reserve(PAGES)
        write(pool, PROMPT, "", 0, pages)
        computes.commit(PROMPT, pages)
        computes.release()
        cache.demote("device")
        ticket = loads.load()
        ticket.wait(10.0)
        np.testing.assert_array_equal(read(pool, ticket.pages(), 0), expected(PROMPT, "", 0))
        with pytest.raises(RequestError, match="loaded once"):
            loads.load()
        loads.release()
        assert cache.settle() and cache.check()


def test_whoever_waits_hears_that_the_cache_was_closed() -> None:
    cache = open_cache(empty_pool(PAGES), host_memory=0)
    holds, waits = cache.match([1, 2]), cache.match([3, 4])
    holds.reserve(PAGES)
    with ThreadPoolExecutor(1) as threads:
        heard = threads.submit(waits.reserve, 1, timeout_s=100.0)
        cache.close()
        with pytest.raises(StrataError, match="was closed"):
            heard.result(20.0)
    waits.release()


def test_whoever_waits_for_a_layer_hears_that_the_cache_was_closed() -> None:
    pool, hold = empty_pool(PAGES), LayerHold("load", 1, 60.0)
    cache = open_cache(pool, hold=hold)
    compute(cache, pool, PROMPT)
    cache.demote("device")
    match = cache.match(PROMPT)
    ticket = match.load()
    ticket.wait_layer(0, 10.0)
    with ThreadPoolExecutor(2) as threads:
        heard = threads.submit(ticket.wait_layer, LAYERS - 1, 50.0)
        closing = threads.submit(cache.close)
        with pytest.raises(StrataError, match=r"shut down|closed") as caught:
            heard.result(40.0)
        hold.release()
        closing.result(40.0)
    assert not isinstance(caught.value, LoadFailedError), "nothing is wrong with the load"
    match.release()


def test_transfers_of_a_load_are_known_without_asking_for_its_pages() -> None:
    pool, hold = empty_pool(PAGES), LayerHold("load", 1, 20.0)
    with open_cache(pool, hold=hold) as cache:
        compute(cache, pool, PROMPT)
        cache.demote("device")
        lease = cache.runtime.lease(np.asarray(PROMPT, np.uint32), "")
        lease.load(PAGES, 10.0)
        deadline = time.monotonic() + 20.0
        while not lease.loads and time.monotonic() < deadline:
            time.sleep(0.001)
        assert [lease.load_state(load, LAYERS - 1) for load in lease.loads] == ["pending"]
        hold.release()
        assert lease.wait_layer(LAYERS - 1, 10.0) == "ready"
        lease.release()


def test_two_engines_that_compute_the_same_keep_their_own_pages() -> None:
    pool = empty_pool(2 * PAGES)
    with open_cache(pool) as cache, cache.match(PROMPT) as late:
        own = late.reserve(PAGES)
        first = compute(cache, pool, PROMPT)
        write(pool, PROMPT, "", 0, own)
        assert late.commit(PROMPT, own) == own.tolist()
        np.testing.assert_array_equal(read(pool, own, 0), expected(PROMPT, "", 0))
        with cache.match(PROMPT) as match:
            assert match.load().pages().tolist() == first
    assert not set(own) & set(first)


def test_misuse_is_refused_in_words() -> None:
    pool = empty_pool(8)
    cache = open_cache(pool)
    match = cache.match(PROMPT)
    pages = match.reserve(2)
    with pytest.raises(RequestError, match="is not reserved by this match"):
        match.commit(PROMPT[:2], [pages[0] ^ 7])
    with pytest.raises(RequestError, match=r"4 tokens are 2 whole pages of 2, 0 of them .* and 1 pages came"):
        match.commit(PROMPT[:4], pages[:1])
    with pytest.raises(RequestError, match="comes twice"):
        match.commit(PROMPT[:4], [pages[0], pages[0]])
    match.commit(PROMPT[:4], pages)
    with pytest.raises(RequestError, match="was committed"):
        match.commit(PROMPT[:8], pages)
    with pytest.raises(RequestError, match="is not reserved"):
        match.abort(pages)
    with pytest.raises(RequestError, match="load before the first commit"):
        match.load().pages()
    more = match.reserve(1)
    with pytest.raises(RequestError, match="first 4 tokens are not those"):
        match.commit([1, 2, 3, 4, 5, 6], more)
    match.abort(more)
    with pytest.raises(RequestError, match="integers"):
        cache.match([-1])
    with pytest.raises(RequestError, match="there is no tier"):
        cache.demote("attic")
    match.release()
    match.release()
    with pytest.raises(RequestError, match="released"):
        match.reserve(1)
    other = cache.match(PROMPT)
    ticket = other.load()
    with pytest.raises(RequestError, match="loaded once"):
        other.load()
    with pytest.raises(RequestError, match="none of the pool's 3"):
        ticket.wait_layer(3)
    cache.close()
    cache.close()
    with pytest.raises(RequestError, match="closed"):
        cache.match(PROMPT)
    with pytest.raises(RequestError, match="closed"):
        other.reserve(1)
    other.release()


def test_pools_of_another_shape_are_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="page_size of 16"):
        strata.TieredCache(empty_pool(4), 16)
    with pytest.raises(ConfigError, match="contiguous"):
        open_cache(empty_pool(4)[:, :, ::2])
    with pytest.raises(ConfigError, match="page_size"):
        open_cache(np.zeros((2, 2)))
    with pytest.raises(ConfigError, match="identity"):
        open_cache(empty_pool(4), disk_path=tmp_path)
    with pytest.raises(ConfigError, match="CacheOptions"):
        open_cache(empty_pool(4), colour="red")
    with pytest.raises(ConfigError, match=r"'policy'.*CacheOptions$"):
        open_cache(empty_pool(4), policy="lpm")
    with pytest.raises(ConfigError, match="CacheOptions and SchedulerOptions"):
        strata.Scheduler(empty_pool(4), PAGE_SIZE, colour="red")
    with pytest.raises(
        ConfigError, match=r"--host-memory 1024\.0 TiB holds \d+ pages of 4 KiB.*give at most"
    ):
        open_cache(empty_pool(4), host_memory=1 << 50)
    with pytest.raises(ConfigError, match="write-policy"):
        open_cache(empty_pool(4), write_policy="never")


@pytest.mark.parametrize("policy", ["back", "selective"])
def test_what_is_evicted_is_saved_as_the_policy_says(policy: str) -> None:
    pool = empty_pool(PAGES)
    with open_cache(pool, write_policy=policy) as cache:
        compute(cache, pool, PROMPT)
        compute(cache, pool, [9] * len(PROMPT))
        with cache.match(PROMPT) as match:
            assert places(match) == ((0, len(PROMPT), 0) if policy == "back" else (0, 0, 0))
        if policy == "back":
            assert_comes_back(cache, pool, PROMPT)
        assert cache.settle() and cache.check()


class PassesDown:
    """A runtime whose passes down leave so many pages above each time; it was moved for, kept or not."""

    def __init__(self, kept: list[int]) -> None:
        self.kept = kept

    def demote(self, tiers: list[str], timeout_s: float) -> dict[str, int]:
        assert tiers == ["device", "host"] and timeout_s > 0
        return {"device_kept": self.kept.pop(0), "host_kept": 0, "device_moved": 4, "host_moved": 0}


@pytest.mark.parametrize(
    ("kept", "passes"),
    [([8, 4, 0, 0], 3), ([8, 8, 8, 8], 2), ([8, 4, 4, 4], 3)],
    ids=["a small host", "a disk that takes nothing", "a disk that fails meanwhile"],
)
def test_the_way_down_ends_once_nothing_gets_lower(kept: list[int], passes: int) -> None:
    runtime: Any = PassesDown(list(kept))
    assert move_to_disk(runtime, 300.0)["device_moved"] == 4 * passes
