"""The copy threads alone, for engines that keep their own books: pages between a layer-first pool and page-first
memory, each piece in place, a load layer by layer. For a GPU's pool `strata.device.cuda.CudaMover` is the Mover, and
`strata._core.TransferQueue` its source of work.

Source: section 3.2 of the Strata paper, whose kernels these threads stand in for on a CPU; `cuda/address.h` states the
address rule of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from strata._core import CopyMover as CoreMover
from strata._core import Movement
from strata.cache.pool import Pool, Tensor
from strata.errors import ConfigError, RequestError

Pages = Sequence[int] | npt.NDArray[Any]


class CopyMover:
    """Moves pages between `pool`, `[layers, parts, pages, page_size, ...]`, and `host`, `[pages, layers, parts,
    page_size, ...]`, numpy arrays or torch tensors in RAM of one dtype. A page that moves must not be touched until its
    Movement ended; which pages may move is the caller's business. All methods may be called from any thread.

    Raises ConfigError for memory of another shape or for `threads` outside 1 to 16, CapacityError for no threads.
    """

    def __init__(
        self,
        pool: Tensor | npt.NDArray[Any],
        host: Tensor | npt.NDArray[Any],
        page_size: int = 16,
        threads: int = 1,
    ) -> None:
        near = Pool.of(pool, page_size)
        near.require_ram()
        shape, found = (near.layers, near.parts, *near.inner), tuple(int(size) for size in host.shape)
        if found[1:] != shape or str(host.dtype) != str(pool.dtype):
            raise ConfigError(
                f"host memory of shape {list(found)} and {host.dtype} holds no pages of this pool: it must be "
                f"[pages, {', '.join(map(str, shape))}] and {pool.dtype}"
            )
        # Page-first memory of n pages is one layer-first pool of n "layers", as far as its checks go.
        far = Pool.of(host, page_size)
        far.require_ram()
        self._mover = CoreMover(
            (near.layers, near.parts, near.page_size, near.token_bytes),
            (near.address, near.size_bytes, near.pages, pool),
            (far.address, far.size_bytes, found[0], host),
            threads,
        )

    def load(self, host_pages: Pages, pool_pages: Pages) -> Movement:
        """Begins to copy host pages to as many pool pages. `Movement.wait_layer(layer, timeout_s)` returns "ready",
        "failed" or "timeout"; `wait(timeout_s)` is True once nothing touches the pages any more, and raises
        StorageError if it failed; `cancel()` asks for an early end. Raises RequestError, CapacityError."""
        return self._mover.start("load", _pages(host_pages), _pages(pool_pages))

    def backup(self, pool_pages: Pages, host_pages: Pages) -> Movement:
        """Begins to copy pool pages to as many host pages; as `load`."""
        return self._mover.start("backup", _pages(pool_pages), _pages(host_pages))

    def close(self) -> None:
        """Stops the threads; what is under way ends as cancelled. Idempotent."""
        self._mover.close()

    def __enter__(self) -> CopyMover:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _pages(pages: Pages) -> npt.NDArray[np.uint32]:
    try:
        return np.ascontiguousarray(pages, dtype=np.uint32)
    except (OverflowError, ValueError, TypeError) as error:
        raise RequestError(f"pages must be integers from 0 to 2**32 - 1: {error}") from error
