"""`import strata` as other people's serving code uses it."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

import strata
from strata.errors import CapacityError, RequestError, StorageError


def test_a_foreign_engine_reuses_a_prefix() -> None:
    cache = strata.Cache(pages=4, page_size=2)
    prompt = [5, 6, 7, 8, 9]
    with cache.match(prompt) as match:
        assert match.tokens == 0
    pages = cache.reserve(2)
    assert cache.commit(prompt, pages) == []
    with cache.match(prompt) as match:
        assert match.tokens == 4
        assert match.pages.tolist() == pages.tolist()
        assert cache.usage() == {"capacity": 4, "free": 2, "cached": 2, "pinned": 2}
        with pytest.raises(CapacityError, match="3 pages were asked for"):
            cache.reserve(3)
    with cache.match(prompt, salt="tenant") as match:
        assert match.tokens == 0
    assert len(cache.reserve(4)) == 4
    assert cache.usage()["cached"] == 0
    cache.check()


def test_a_match_that_is_dropped_gives_its_pages_back() -> None:
    cache = strata.Cache(pages=1, page_size=1)
    cache.commit([1], cache.reserve(1))
    match = cache.match([1])
    assert cache.usage()["pinned"] == 1
    match.release()
    match.release()
    del match
    assert cache.usage()["pinned"] == 0


def test_misuse_is_refused_in_words() -> None:
    cache = strata.Cache(pages=2, page_size=1)
    with pytest.raises(RequestError, match="integers"):
        cache.match([-1])
    with pytest.raises(RequestError, match="only the first 0 pages"):
        cache.commit([1, 2], cache.reserve(1), from_page=1)
    with pytest.raises(StorageError, match="cannot abort"):
        cache.abort(np.array([1], dtype=np.uint32))
    with pytest.raises(RequestError, match="page_size"):
        strata.Cache(pages=2, page_size=0)


def test_importing_the_package_brings_no_torch() -> None:
    used = "strata.__version__, strata.TieredCache, strata.Scheduler, strata.CopyMover, strata.Plan"
    code = f"import strata, sys; {used}; sys.exit('torch' in sys.modules or 'cupy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_public_name_is_there_and_says_what_it_is() -> None:
    for name in strata.__all__:
        thing = getattr(strata, name)
        assert isinstance(thing, str) or thing.__doc__, name
