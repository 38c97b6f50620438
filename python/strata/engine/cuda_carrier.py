"""What moves pages for an engine whose pool lies on a GPU: the host arena, its queue of transfers and the CUDA Mover.

What holds, beside what `CudaMover` guarantees: a layer that was waited for is there for whatever the calling thread
puts on its current stream afterwards, and the host waits only until the load is queued; whatever was on that stream
when `step_done` was called is waited for by every transfer that begins later, and by whatever a thread puts on a stream
of its own after `step_begins` or `wait_layer`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from strata._core import HostArena, TransferQueue
from strata.cache.core_options import RECORD_ALIGNMENT
from strata.cache.pool import Pool
from strata.device.cuda import CudaMover
from strata.device.cuda_runtime import CudaRuntime
from strata.device.cupy_runtime import CupyRuntime
from strata.device.edge import Edge
from strata.device.kernels import Layout
from strata.errors import ConfigError

QUEUED_TRANSFERS = 1024
_SLICE_S = 0.001
"""How long one look for a load on the device lasts before its ticket is read again: it may have failed, or be over."""
_NEVER_FREED: list[CudaCarrier] = []


class Loads(Protocol):
    """The loads of a plan or of a lease."""

    @property
    def loads(self) -> list[int]:
        """Transfers."""
        ...

    def load_state(self, load: int, layer: int) -> str:
        """`ready`, `pending` or `failed`."""
        ...


class CudaCarrier:
    """Carries pages between `pool` and an arena of its own, pinned, made with the `options` of `Runtime`. `runtime`
    stands in for the GPU in tests. Raises ConfigError for a pool that is on no GPU and without the extra `cuda`,
    CapacityError, DeviceError."""

    def __init__(self, pool: Pool, options: dict[str, Any], runtime: CudaRuntime | None = None) -> None:
        self._runtime = runtime or CupyRuntime(_device_of(pool))
        self._runtime.bind_thread()
        self.arena = HostArena(options)
        self.queue = TransferQueue(QUEUED_TRANSFERS)
        edge = edge_of(
            self.arena,
            pool.address,
            pool.layers,
            pool.parts,
            pool.pages,
            pool.page_size * pool.token_bytes,
        )
        self._mover = CudaMover(self._runtime, self.queue, edge, keeps=(pool.owner, self.arena))
        self._mover.start()

    @property
    def problem(self) -> str | None:
        """Why transfers fail; None while all is well."""
        return self._mover.problem

    def wait_layer(self, loads: Loads, layer: int, timeout_s: float) -> str:
        """Makes the calling thread's stream wait for a layer: `ready`, `failed` or, if the load is not queued within
        `timeout_s` seconds, `timeout`. Raises DeviceError."""
        self._runtime.bind_thread()
        stream = self._runtime.compute_stream()
        self._mover.step_begins(stream)

        def is_ordered(load: int, limit_s: float) -> bool:
            return self._mover.wait_layer(load, layer, stream, limit_s)

        return settle_loads(loads, layer, timeout_s, is_ordered)

    def step_begins(self) -> None:
        """What the calling thread puts on its stream from now on comes after every step that was reported, on whatever
        stream. Raises DeviceError."""
        self._runtime.bind_thread()
        self._mover.step_begins(self._runtime.compute_stream())

    def step_done(self) -> None:
        """What is on the calling thread's stream reads and writes pages that are about to be published or let go.
        Raises DeviceError: then nothing is moved any more."""
        self._runtime.bind_thread()
        self._mover.step_done(self._runtime.compute_stream())

    def close(self) -> None:
        """Ends the Mover. Memory that the device has not let go of is never freed."""
        if not self._mover.close():
            _NEVER_FREED.append(self)


def _device_of(pool: Pool) -> int:
    """The number of the GPU that the pool lies on."""
    found = re.fullmatch(r"cuda(?::(\d+))?", pool.device)
    if found is None:
        raise ConfigError(
            f"the pool lies on {pool.device}, and CudaCarrier moves pages of a GPU: give a tensor on cuda, or leave "
            "the carrier out for a pool in RAM"
        )
    return torch.cuda.current_device() if found[1] is None else int(found[1])


def edge_of(arena: HostArena, address: int, layers: int, parts: int, pages: int, piece: int) -> Edge:
    """The edge between a layer-first pool of `pages` pages at `address`, in pieces of `piece` bytes, and `arena`."""
    return Edge(
        device_address=address,
        device_layout=Layout.layer_first(layers, parts, pages, piece),
        device_pages=pages,
        host_address=arena.address,
        host_layout=Layout.page_first(layers, parts, piece, RECORD_ALIGNMENT),
        host_pages=arena.pages,
        host_bytes=arena.size_bytes,
        layers=layers,
        parts=parts,
    )


def settle_loads(loads: Loads, layer: int, timeout_s: float, is_settled: Callable[[int, float], bool]) -> str:
    """Asks `is_settled` (load, seconds) for each load whose layer is pending, until it is or its ticket says more.
    `ready` once all are settled or there; `failed` or `timeout` otherwise."""
    deadline = time.monotonic() + timeout_s
    for load in loads.loads:
        while (state := loads.load_state(load, layer)) == "pending":
            left = deadline - time.monotonic()
            if left <= 0:
                return "timeout"
            if is_settled(load, min(left, _SLICE_S)):
                state = loads.load_state(load, layer)
                break
        if state == "failed":
            return state
    return "ready"
