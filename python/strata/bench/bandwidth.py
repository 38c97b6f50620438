"""What this machine can do with the same bytes and no engine: copies in memory and reads from the disk's
files.
"""

from __future__ import annotations

import itertools
import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt

from strata._core import copy_bytes

_READ_BLOCK = 4 << 20


class CopyBaseline:
    """Copies `size` bytes between two buffers that are in memory already, in two ways."""

    def __init__(self, size: int, threads: int) -> None:
        self._source: npt.NDArray[np.uint8] = np.full(size, 1, dtype=np.uint8)
        self._destination: npt.NDArray[np.uint8] = np.full(size, 2, dtype=np.uint8)
        bounds = np.linspace(0, size, threads + 1, dtype=np.int64)
        self._parts = [slice(first, last) for first, last in itertools.pairwise(bounds)]
        self._threads = ThreadPoolExecutor(threads)
        self.threaded()  # starts the threads

    def streaming(self) -> float:
        """GB/s of one thread with non-temporal stores, the instructions that the engine's copies use."""
        return self._rate(lambda: copy_bytes(self._destination, self._source, True))

    def threaded(self) -> float:
        """GB/s of as many threads as the engine copies with, each with the C library's memcpy."""
        return self._rate(lambda: list(self._threads.map(self._copy, self._parts)))

    def _copy(self, part: slice) -> None:
        np.copyto(self._destination[part], self._source[part])

    def _rate(self, work: Callable[[], object]) -> float:
        start = time.perf_counter()
        work()
        return len(self._source) / (time.perf_counter() - start) / 1e9


def raw_read_gbps(root: Path, threads: int, most_bytes: int) -> float | None:
    """GB/s of plain O_DIRECT reads of at most `most_bytes` of the files under `root`, nothing checked;
    None where there is nothing to read or the file system refuses O_DIRECT.
    """
    blocks = [
        (path, offset)
        for path in sorted(root.rglob("*"))
        if path.is_file()
        for offset in range(0, path.stat().st_size - _READ_BLOCK + 1, _READ_BLOCK)
    ][: -(-most_bytes // _READ_BLOCK)]
    if not blocks:
        return None
    start = time.perf_counter()
    try:
        with ThreadPoolExecutor(threads) as pool:
            read = sum(pool.map(_read_block, blocks))
    except OSError:
        return None
    return read / (time.perf_counter() - start) / 1e9


def _read_block(block: tuple[Path, int]) -> int:
    path, offset = block
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        # Anonymous maps start at a page, as O_DIRECT asks.
        with mmap.mmap(-1, _READ_BLOCK) as buffer:
            return os.preadv(descriptor, [buffer], offset)
    finally:
        os.close(descriptor)
