"""The edge between a device pool and the host arena, and what is queued on a stream to move pages across it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from strata.device.cuda_runtime import CudaRuntime, KernelCall, Stream
from strata.device.kernels import Kind, Layout
from strata.device.page_tables import PageTable
from strata.device.path_choice import Direction, Path


@dataclass(frozen=True)
class Edge:
    """Both ends: addresses, sizes, and where pages lie in them."""

    device_address: int
    device_layout: Layout
    device_pages: int
    host_address: int
    host_layout: Layout
    host_pages: int
    host_bytes: int
    layers: int
    parts: int

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return self.layers * self.parts * self.device_layout.piece_bytes


@dataclass(frozen=True)
class PagePairs:
    """Pages that belong together, by their place in both tiers; uint32 of one length."""

    device: npt.NDArray[np.uint32]
    host: npt.NDArray[np.uint32]

    def problem(self, edge: Edge) -> str | None:
        """Why they are no pages of this edge, if so."""
        for name, pages, most in (
            ("device", self.device, edge.device_pages),
            ("host", self.host, edge.host_pages),
        ):
            if len(pages) and int(pages.max()) >= most:
                return f"{name} page {int(pages.max())} does not exist: the pool has {most} pages"
        return None


class Work:
    """One transfer's commands. A load has one for each layer unless its path takes all at once, a backup one in all;
    `begin` comes before the first."""

    def __init__(
        self, runtime: CudaRuntime, edge: Edge, direction: Direction, pairs: PagePairs, path: Path
    ) -> None:
        self._runtime = runtime
        self._edge = edge
        self._direction = direction
        self._pairs = pairs
        self._path = path
        self._tables = (0, 0)

    @property
    def commands(self) -> int:
        """How many there are."""
        return self._edge.layers if self._goes_by_layer else 1

    @property
    def _goes_by_layer(self) -> bool:
        return self._direction == "load" and not self._path.whole

    def begin(self, table: PageTable, stream: Stream) -> None:
        """Queues what the commands need on the device. `table` stays in use until the last of them has run."""
        if self._path.kind == "kernel":
            self._tables = table.send(self._runtime, self._pairs.device, self._pairs.host, stream)

    def queue(self, command: int, stream: Stream) -> None:
        """Queues one command: for a load that goes by layer the layer of that number."""
        if self._path.kind == "batch":
            layers = range(command, command + 1) if self._goes_by_layer else range(self._edge.layers)
            self._queue_batch(layers, stream)
        elif self._goes_by_layer:
            self._queue_kernel("load_layer", command, stream)
        else:
            self._queue_kernel("load_all" if self._direction == "load" else "back_up_all", 0, stream)

    def _queue_kernel(self, kind: Kind, layer: int, stream: Stream) -> None:
        edge = self._edge
        call = KernelCall(
            kind=kind,
            device_address=edge.device_address,
            host_address=edge.host_address,
            device_layout=edge.device_layout,
            host_layout=edge.host_layout,
            device_pages=self._tables[0],
            host_pages=self._tables[1],
            count=len(self._pairs.device),
            layer=layer,
            parts=edge.parts,
            layers=edge.layers,
            blocks=self._path.blocks,
        )
        self._runtime.launch(call, stream)

    def _queue_batch(self, layers: range, stream: Stream) -> None:
        edge = self._edge
        device = _pieces(edge.device_address, edge.device_layout, layers, edge.parts, self._pairs.device)
        host = _pieces(edge.host_address, edge.host_layout, layers, edge.parts, self._pairs.host)
        destinations, sources = (device, host) if self._direction == "load" else (host, device)
        self._runtime.copy_batch(destinations, sources, edge.device_layout.piece_bytes, stream)


def _pieces(
    address: int, layout: Layout, layers: range, parts: int, pages: npt.NDArray[np.uint32]
) -> npt.NDArray[np.uint64]:
    """Addresses of all pieces, layer by layer, part by part."""
    layer = np.arange(layers.start, layers.stop, dtype=np.uint64) * np.uint64(layout.layer_stride)
    part = np.arange(parts, dtype=np.uint64) * np.uint64(layout.part_stride)
    page = pages.astype(np.uint64) * np.uint64(layout.page_stride)
    start = np.uint64(address + layout.base)
    pieces: npt.NDArray[np.uint64] = start + layer[:, None, None] + part[:, None] + page
    return pieces.reshape(-1)
