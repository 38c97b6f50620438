"""The cache over a pool whose transfers a device of its own carries out, late and out of order: a fake one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tiered_pages import LAYERS, PAGE_SIZE, empty_pool, expected, read, write

from strata import CudaCarrier, TieredCache
from strata.cache.pool import Pool
from strata.device.fake_cuda import FakeCudaRuntime
from strata.errors import ConfigError, LoadFailedError

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
