"""The cache over a pool whose transfers a device of its own carries out, late and out of order: a fake one."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiered_pages import LAYERS, PAGE_SIZE, empty_pool, expected, read, write

from strata import CudaCarrier, TieredCache
from strata.cache.pool import Pool
from strata.device.cuda_runtime import Stream
from strata.device.fake_cuda import FakeCudaRuntime
from strata.engine import cuda_carrier
from strata.errors import ConfigError, LoadFailedError, StorageError

PROMPT = list(range(100, 112))
PAGES = len(PROMPT) // PAGE_SIZE


def open_cache(fake: FakeCudaRuntime, pages: int) -> tuple[TieredCache, Any]:
    pool = fake.allocate_pool(empty_pool(pages).shape, torch.float64)

    def carrier(pool: Pool, options: dict[str, Any]) -> CudaCarrier:
        return CudaCarrier(pool, options, fake)

    return TieredCache(pool, PAGE_SIZE, host_memory="1MiB", carrier=carrier), pool.numpy()


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_prompts_come_back_under_pressure(seed: int) -> None:
    fake = FakeCudaRuntime(seed)
    cache, pool = open_cache(fake, PAGES + 2)
    prompts = [PROMPT, PROMPT[:6] + [7] * 6, [9] * 12]
    with cache:
        for turn in range(12):
            tokens = prompts[turn * (1 + seed % 2) % 3]
            with cache.match(tokens) as match:
                ticket = match.load()
                pages = ticket.pages().tolist()
                for layer in range(LAYERS):
                    ticket.wait_layer(layer, 10.0)
                    found = read(pool, pages, layer)
                    np.testing.assert_array_equal(found, expected(tokens[: ticket.tokens], "", layer))
                fresh = match.reserve(PAGES - len(pages), timeout_s=10.0)
                write(pool, tokens, "", len(pages), fresh)
                match.commit(tokens, fresh)
            assert cache.settle()
        assert cache.check()
        stats = cache.stats()
        assert stats["load_completed"] > 0 and stats["backup_completed"] > 0
    assert not fake.registered and fake.is_empty


def test_a_device_that_fails_gives_errors_and_never_bytes() -> None:
    fake = FakeCudaRuntime(1)
    cache, pool = open_cache(fake, PAGES)
    with cache:
        with cache.match(PROMPT) as match:
            fresh = match.reserve(PAGES)
            write(pool, PROMPT, "", 0, fresh)
            match.commit(PROMPT, fresh)
        cache.demote("device")
        match = cache.match(PROMPT)
        for method in ("launch", "copy_async", "copy_batch"):
            fake.fail_next(method)
        ticket = match.load()
        with pytest.raises(LoadFailedError, match="its transfer failed"):
            for layer in range(LAYERS):
                ticket.wait_layer(layer, 10.0)
            ticket.wait(10.0)
            raise AssertionError("nothing failed")
        match.release()
        assert cache.settle() and cache.check()


def test_a_pool_elsewhere_needs_a_carrier() -> None:
    meta = torch.empty(empty_pool(4).shape, dtype=torch.float64, device="meta")
    with pytest.raises(ConfigError, match=r"lies on meta.*CudaCarrier"):
        TieredCache(meta, PAGE_SIZE)


class TwoStreams(FakeCudaRuntime):
    """A fake whose engine computes on one of two streams. The first runs nothing before `let_first_run`."""

    def __init__(self) -> None:
        super().__init__(1)
        self.first, self.second = self.create_stream(), self.create_stream()
        self.current = self.first
        self._gate = self.create_event()
        self._events[self._gate].queued += 1
        self.stream_wait_event(self.first, self._gate)

    def compute_stream(self) -> Stream:
        return self.current

    def let_first_run(self) -> None:
        with self._lock:
            self._events[self._gate].reached += 1
        self.drain()


def test_pages_that_go_from_one_stream_to_another_are_whole() -> None:
    fake = TwoStreams()
    cache, pool = open_cache(fake, PAGES)
    order: list[str] = []
    with cache, ExitStack() as ends:
        ends.callback(fake.let_first_run)  # also where an assertion fails: nothing ends before
        with cache.match(PROMPT) as match:
            fresh = match.reserve(PAGES)
            fake.run(fake.first, lambda: write(pool, PROMPT, "", 0, fresh))
            match.commit(PROMPT, fresh)
        reader = cache.match(PROMPT)
        ticket = reader.load()
        fake.current = fake.second
        pages = ticket.pages().tolist()
        fake.run(fake.second, lambda: order.append(f"reads {read(pool, pages, 0)[0, 0, 0]}"))
        fake.drain()
        assert order == [], "it read before the other stream had written"
        fake.let_first_run()
        assert order == [f"reads {expected(PROMPT, '', 0)[0, 0, 0]}"]
        reader.release()
        assert cache.settle() and cache.check()


@pytest.mark.parametrize("way", ["reserve", "wait_layer"])
def test_a_stream_that_is_handed_pages_waits_for_their_last_reader(way: str) -> None:
    fake = TwoStreams()
    cache, _pool = open_cache(fake, PAGES)
    order: list[str] = []
    with cache, ExitStack() as ends:
        ends.callback(fake.let_first_run)  # also where an assertion fails: nothing ends before
        first, second = cache.match(PROMPT), cache.match([1, *PROMPT])
        ticket = second.load()
        first.reserve(PAGES)
        fake.run(fake.first, lambda: order.append("first"))
        first.release()
        fake.current = fake.second
        if way == "reserve":
            second.reserve(PAGES)
        else:
            ticket.wait_layer(0)
        fake.run(fake.second, lambda: order.append("second"))
        fake.drain()
        assert order == []
        fake.let_first_run()
        assert order == ["first", "second"]
        second.release()


def test_the_carrier_is_closed_though_core_does_not_end_well() -> None:
    cache, _pool = open_cache(FakeCudaRuntime(1), PAGES)
    real, closed = cache._runtime, list[str]()

    class Broken:
        def close(self) -> None:
            real.close()
            raise StorageError("the disk refuses")

    class Noting:
        def close(self) -> None:
            closed.append("carrier")
            carrier.close()

    carrier, cache.carrier, cache._runtime = cache.carrier, Noting(), Broken()  # type: ignore[assignment]
    with pytest.raises(StorageError, match="the disk refuses"):
        cache.close(demote_s=0.0)
    assert closed == ["carrier"]


@pytest.mark.parametrize(("device", "number"), [("cuda:3", 3), ("cuda:0", 0), ("cuda", 1)])
def test_the_gpu_is_the_one_of_the_pool(device: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def no_gpu(index: int) -> None:
        asked.append(index)
        raise ConfigError("there is none here")

    monkeypatch.setattr(cuda_carrier, "CupyRuntime", no_gpu)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    pool = replace(Pool.of(empty_pool(4), PAGE_SIZE), device=device)
    with pytest.raises(ConfigError, match="there is none here"):
        CudaCarrier(pool, {})
    assert asked == [number]


def test_a_pool_that_is_on_no_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"lies on cpu, and CudaCarrier.*tensor on cuda"):
        TieredCache(empty_pool(4), PAGE_SIZE, carrier=CudaCarrier)
