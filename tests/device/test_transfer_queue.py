"""The Python side of `TransferQueue` and `HostArena`; `strata_tier` tests the rules."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from strata._core import HostArena, LayerHold, Runtime, TransferQueue
from strata.config import StrataConfig
from strata.engine import ServedModel
from strata.engine.runtime_options import PoolSizes, runtime_options
from strata.errors import ConfigError
from strata.models import tiny_random_model


def options_of(page_size: int = 4) -> dict[str, Any]:
    """What a Runtime of a tiny model is made with."""
    served = ServedModel(tiny_random_model(0), None, "tiny", "tiny")
    config = StrataConfig.of(page_size=page_size, device_memory="1MiB", host_memory="1MiB", disk_capacity=0)
    return runtime_options(served, config, PoolSizes.of(served.model, config.cache, grows=False))


def runtime_of(options: dict[str, Any], **arguments: Any) -> Runtime:
    """One over a pool that nobody looks at."""
    pool = torch.zeros(1 << 20, dtype=torch.uint8)
    return Runtime(options, pool.data_ptr(), pool.nbytes, pool, **arguments)


def test_nothing_is_taken_from_a_queue_that_nobody_fills() -> None:
    queue = TransferQueue(4)
    assert queue.take(0.001) is None and queue.outstanding == 0
    queue.done(7, 1, 1, 0.0)
    queue.layers_ready(7, 1)
    queue.doom(7, "gone")
    queue.cancelled(7, 0.0)
    assert queue.unknown_reports == 4 and queue.is_cancelled(7)
    queue.close()
    queue.close(torn_down=True)
    with pytest.raises(ConfigError, match="at least 1"):
        TransferQueue(0)


def test_the_arena_says_where_it_lies() -> None:
    options = options_of()
    arena = HostArena(options)
    assert arena.address % (2 << 20) == 0 and arena.page_stride % 4096 == 0
    assert arena.pages >= options["host_pages"] and arena.size_bytes >= arena.pages * arena.page_stride - 4096


def test_a_runtime_refuses_what_does_not_fit_together() -> None:
    options = options_of()
    arena, queue = HostArena(options), TransferQueue(64)
    with pytest.raises(ConfigError, match="needs the arena"):
        runtime_of(options, mover=queue)
    with pytest.raises(ConfigError, match="no layer to hold"):
        runtime_of(options, mover=queue, arena=arena, hold=LayerHold("load", 0, 1.0))
    with pytest.raises(ConfigError, match="made for other pages"):
        runtime_of(options_of(page_size=8), mover=queue, arena=arena)


def test_a_queue_that_is_closed_leaves_its_runtime_to_compute() -> None:
    options = options_of()
    arena, queue = HostArena(options), TransferQueue(64)
    queue.close()
    runtime = runtime_of(options, mover=queue, arena=arena)
    link, problem = runtime.measured_link
    assert link is None and problem is not None and "closed" in problem
    with pytest.raises(ConfigError, match="one Runtime"):
        runtime_of(options, mover=queue, arena=arena)
    runtime.close()
