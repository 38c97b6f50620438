"""The copy threads alone: the right bytes, in the right places, layer by layer, and no others."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiered_pages import LAYERS, PAGE_SIZE, PARTS, WIDTH, empty_pool

from strata import CopyMover
from strata._core import LayerHold
from strata.errors import CapacityError, ConfigError, RequestError, StorageError


def test_pages_go_down_and_come_back_layer_by_layer() -> None:
    rng = np.random.default_rng(0)
    pool = rng.normal(size=empty_pool(6).shape)
    before = pool.copy()
    host = torch.zeros(9, LAYERS, PARTS, PAGE_SIZE, WIDTH, dtype=torch.float64)
    with CopyMover(torch.from_numpy(pool), host, PAGE_SIZE, threads=2) as mover:
        assert mover.backup([5, 0, 2], [1, 8, 3]).wait(10.0)
        for page, copy in ((5, 1), (0, 8), (2, 3)):
            np.testing.assert_array_equal(host[copy].numpy(), before[:, :, page])
        assert not host[[0, 2, 4, 5, 6, 7]].any()
        pool[:] = np.nan
        movement = mover.load([3, 1], [4, 2])
        for layer in range(LAYERS):
            assert movement.wait_layer(layer, 10.0) == "ready"
            np.testing.assert_array_equal(pool[layer][:, [4, 2]], before[layer][:, [2, 5]])
        assert movement.wait(10.0)
        assert np.isnan(pool[:, :, [0, 1, 3, 5]]).all()


@pytest.mark.parametrize("dtype", ["float32", "int16", "complex64"])
def test_numpy_and_torch_share_a_dtype(dtype: str) -> None:
    pool = torch.ones(LAYERS, PARTS, 4, PAGE_SIZE, WIDTH, dtype=getattr(torch, dtype))
    host = np.zeros((4, LAYERS, PARTS, PAGE_SIZE, WIDTH), dtype)
    with CopyMover(pool, host, PAGE_SIZE) as mover:
        assert mover.backup([1], [2]).wait(10.0)
        assert host[2].all() and not host[[0, 1, 3]].any()
    with pytest.raises(ConfigError, match="and float16 holds no pages"):
        CopyMover(pool, host.real.astype(np.float16), PAGE_SIZE)


def test_many_transfers_end_whoever_waits() -> None:
    pool, host = empty_pool(8), np.zeros((8, LAYERS, PARTS, PAGE_SIZE, WIDTH))
    with CopyMover(pool, host, PAGE_SIZE) as mover:
        movements = [mover.backup([page], [page]) for page in range(8)]
        assert movements[-1].wait(10.0)
        assert all(movement.wait(10.0) for movement in movements)
        assert movements[0].wait_layer(0, 10.0) == "ready"


def test_a_page_is_never_written_while_another_transfer_uses_it() -> None:
    pool, host = empty_pool(8), np.ones((8, LAYERS, PARTS, PAGE_SIZE, WIDTH))
    hold = LayerHold("load", 1, 20.0)
    with CopyMover(pool, host, PAGE_SIZE, threads=2, hold=hold) as mover:
        movement = mover.load([1, 2], [4, 5])
        assert movement.wait_layer(0, 10.0) == "ready"
        meeting = [
            (mover.load, [3], [5], "pool page 5"),
            (mover.backup, [4], [3], "pool page 4"),
            (mover.backup, [0], [2], "host page 2"),
        ]
        for start, sources, targets, what in meeting:
            with pytest.raises(RequestError, match=f"{what} is part of a transfer that has not ended"):
                start(sources, targets)
        with pytest.raises(RequestError, match="pool page 7 comes twice"):
            mover.load([3, 4], [7, 7])
        shared = mover.load([1], [0])  # both read host page 1
        hold.release()
        # Nothing touches a load's pages once its last layer is there, whether or not `wait` was called.
        assert movement.wait_layer(LAYERS - 1, 10.0) == "ready"
        assert mover.load([3], [5]).wait(10.0) and shared.wait(10.0)
        assert mover.backup([4], [3]).wait(10.0) and mover.backup([0], [2]).wait(10.0)


def test_whoever_waits_for_layers_alone_keeps_no_thread_from_going_on() -> None:
    count = 4096
    pool, host = empty_pool(count + 1), np.ones((1, LAYERS, PARTS, PAGE_SIZE, WIDTH))
    hold = LayerHold("load", 0, 20.0)
    with CopyMover(pool, host, PAGE_SIZE, hold=hold) as mover:
        movements = [mover.load([0], [page]) for page in range(count)]
        with pytest.raises(CapacityError, match=f"{count} transfers have not ended"):
            mover.load([0], [count])
        hold.release()
        assert all(movement.wait_layer(LAYERS - 1, 20.0) == "ready" for movement in movements)
        assert mover.load([0], [count]).wait(10.0)
        assert (pool == 1.0).all()


def test_wrong_use_is_refused_in_words() -> None:
    pool, host = empty_pool(4), np.zeros((4, LAYERS, PARTS, PAGE_SIZE, WIDTH))
    with pytest.raises(ConfigError, match="holds no pages of this pool"):
        CopyMover(pool, host[:, :1].copy(), PAGE_SIZE)
    with pytest.raises(ConfigError, match="threads"):
        CopyMover(pool, host, PAGE_SIZE, threads=99)
    mover = CopyMover(pool, host, PAGE_SIZE)
    with pytest.raises(RequestError, match="2 pages cannot be moved to 1"):
        mover.load([1, 2], [1])
    with pytest.raises(StorageError, match="0 of 1 pages were moved"):
        mover.load([7], [1]).wait(10.0)
    assert mover.load([7], [1]).wait_layer(0, 10.0) == "failed"
    assert mover.backup([7], [1]).wait_layer(0, 10.0) == "failed"
    movement = mover.load([1], [1])
    for layer in (LAYERS, -1):
        with pytest.raises(RequestError, match=f"layer {layer} is none of the pool's {LAYERS}"):
            movement.wait_layer(layer, 10.0)
    assert movement.wait(10.0)
    mover.close()
    mover.close()
    with pytest.raises(StorageError, match="closed"):
        mover.load([1], [1])
