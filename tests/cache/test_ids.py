"""What is no token or page id is refused in words, whatever holds it: nothing wraps, and nothing is cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tiered_pages import LAYERS, PAGE_SIZE, PARTS, WIDTH, empty_pool

from strata import Cache, CopyMover, Scheduler, TieredCache
from strata.cache.ids import id_array
from strata.errors import RequestError

WRONG: list[tuple[Any, str]] = [
    ([3, -1], "got -1"),
    ([2**32], "got 4294967296"),
    ([3, 2**70], f"got {2**70}"),
    ([1, 1.7], "got 1.7"),
    (np.array([5, -1]), "got -1"),
    (np.array([2**32 + 5]), "got 4294967301"),
    (np.array([2**63], dtype=np.uint64), f"got {2**63}"),
    (np.array([1.0, 2.0]), r"got 1.0 \(float64\)"),
    (np.array([1.0, np.nan]), "got nan"),
    (torch.tensor([5, -1]), "got -1"),
    (torch.tensor([1.7]), "got 1.7"),
    (torch.tensor([1.0], requires_grad=True), "integers from 0"),
    (torch.empty(2, dtype=torch.int64, device="meta"), "in RAM"),
    ([True], "got True"),
    (["5"], "got 5"),
    ([None], "got None"),
    ([[1], [2]], "2 dimensions"),
    ([[1], [2, 3]], "integers from 0"),
    (7, "0 dimensions"),
]


@pytest.mark.parametrize(("values", "words"), WRONG)
def test_what_is_no_id_is_refused(values: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        id_array(values, "tokens")


def test_ids_come_through_as_they_are() -> None:
    highest = 2**32 - 1
    for values in (
        [0, highest],
        (0, highest),
        np.array([0, 9, highest])[::2],
        np.array([0, highest], dtype=np.uint64),
        torch.tensor([0, highest]),
    ):
        found = id_array(values, "tokens")
        assert found.tolist() == [0, highest] and found.dtype == np.uint32 and found.flags.c_contiguous
    for empty in ([], np.array([]), torch.tensor([])):
        assert id_array(empty, "tokens").shape == (0,)


@pytest.mark.parametrize("wrong", [np.array([3, -1]), torch.tensor([3, 2**32 + 5])])
def test_every_way_in_refuses(wrong: Any) -> None:
    cache = Cache(4, PAGE_SIZE)
    pool, host = empty_pool(4), np.zeros((4, LAYERS, PARTS, PAGE_SIZE, WIDTH))
    calls = [
        lambda: cache.match(wrong),
        lambda: cache.commit(wrong, cache.reserve(1)),
        lambda: cache.commit([1, 2], wrong),
        lambda: cache.abort(wrong),
    ]
    with TieredCache(pool, PAGE_SIZE, host_memory="1MiB") as tiers, tiers.match([1, 2]) as match:
        calls += [
            lambda: tiers.match(wrong),
            lambda: match.commit(wrong, []),
            lambda: match.commit([1, 2, 3, 4], wrong),
            lambda: match.abort(wrong),
        ]
        with CopyMover(pool.copy(), host, PAGE_SIZE) as mover:
            calls += [lambda: mover.load(wrong, [0, 1]), lambda: mover.backup([0, 1], wrong)]
            with Scheduler(pool.copy(), PAGE_SIZE, host_memory="1MiB") as scheduler:
                calls.append(lambda: scheduler.submit(1, wrong, 1))
                for call in calls:
                    with pytest.raises(RequestError, match=r"integers from 0 to 2\*\*32 - 1, got -?\d+"):
                        call()
