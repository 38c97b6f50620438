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

import numpy.typing as npt

from strata._core import CopyMover as CoreMover
from strata._core import LayerHold
from strata._core import Movement as CoreMovement
from strata.cache.ids import id_array
from strata.cache.pool import Pool, Tensor
from strata.errors import ConfigError, RequestError, StorageError

Pages = Sequence[int] | npt.NDArray[Any]


class CopyMover:
    """Moves pages between `pool`, `[layers, parts, pages, page_size, ...]`, and `host`, `[pages, layers, parts,
    page_size, ...]`, numpy arrays or torch tensors in RAM of one dtype. A page that moves must not be touched by
    anybody else, other movers included, until its Movement ended: that is the caller's business. This mover's own
    transfers never meet. All methods may be called from any thread; `hold` stops transfers for tests.

    Raises ConfigError for memory of another shape or for `threads` outside 1 to 16, CapacityError for no threads.
    """

    def __init__(
        self,
        pool: Tensor | npt.NDArray[Any],
        host: Tensor | npt.NDArray[Any],
        page_size: int = 16,
        threads: int = 1,
        *,
        hold: LayerHold | None = None,
    ) -> None:
        near = Pool.of(pool, page_size)
        near.require_ram()
        shape, found = (near.layers, near.parts, *near.inner), tuple(int(size) for size in host.shape)
        # Numpy and torch call one dtype by one name, but for torch's prefix.
        if found[1:] != shape or str(host.dtype).removeprefix("torch.") != near.dtype:
            raise ConfigError(
                f"host memory of shape {list(found)} and {host.dtype} holds no pages of this pool: it must be "
                f"[pages, {', '.join(map(str, shape))}] and {pool.dtype}"
            )
        # Page-first memory of n pages is one layer-first pool of n "layers", as far as its checks go.
        far = Pool.of(host, page_size)
        far.require_ram()
        self._layers = near.layers
        self._mover = CoreMover(
            (near.layers, near.parts, near.page_size, near.token_bytes),
            (near.address, near.size_bytes, near.pages, pool),
            (far.address, far.size_bytes, found[0], host),
            threads,
            hold,
        )

    def load(self, host_pages: Pages, pool_pages: Pages) -> Movement:
        """Begins to copy host pages to as many pool pages. Raises RequestError for what are no page ids or not as many
        of both, and for pages that a transfer under way writes, or reads while this one would write them (a load whose
        layers are all there is over); CapacityError while 4,096 transfers have not ended; StorageError after `close`.
        """
        return self._start("load", host_pages, pool_pages)

    def backup(self, pool_pages: Pages, host_pages: Pages) -> Movement:
        """Begins to copy pool pages to as many host pages; as `load`."""
        return self._start("backup", pool_pages, host_pages)

    def _start(self, kind: str, sources: Pages, targets: Pages) -> Movement:
        started = self._mover.start(kind, id_array(sources, "pages"), id_array(targets, "pages"))
        return Movement(started, self._layers)

    def close(self) -> None:
        """Stops the threads; what is under way ends as cancelled, and both memories are the caller's again. Idempotent.
        Raises StrataError if a thread still runs after some two seconds: then they are not yet."""
        self._mover.close()

    def __enter__(self) -> CopyMover:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Movement:
    """A transfer under way, made by `CopyMover`. Any thread may wait on it."""

    def __init__(self, movement: CoreMovement, layers: int) -> None:
        self._movement = movement
        self._layers = layers

    def wait_layer(self, layer: int, timeout_s: float) -> str:
        """Whether layer `layer` is in its place: `ready`, `failed` or, after `timeout_s` seconds, `timeout`. Of a
        backup all layers are there at its end. After `failed` threads may still touch the pages until `wait` returns.
        Raises RequestError for a layer that the pool has not."""
        if not 0 <= layer < self._layers:
            raise RequestError(f"layer {layer} is none of the pool's {self._layers}")
        try:
            return self._movement.wait_layer(layer, timeout_s)
        except StorageError:
            return "failed"

    def wait(self, timeout_s: float) -> bool:
        """True once nothing touches the pages any more, False if that takes longer than `timeout_s` seconds. Raises
        StorageError, with the reason, if not all of them are whole."""
        return self._movement.wait(timeout_s)

    def cancel(self) -> None:
        """Asks for an early end, which `wait` sees."""
        self._movement.cancel()
