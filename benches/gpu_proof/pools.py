"""Two pools with scattered pages, layer-first on the device and page-first on the host, and every way to move between
them: the kernels, a copy a piece, a batch of copies, and one large copy of as many bytes.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpu_proof.rounds import Sample
from gpu_proof.shapes import Direction, Shape
from strata.device.cuda_runtime import CudaRuntime, KernelCall, Stream
from strata.device.kernels import Layout

HOST_ALIGNMENT = 4096
MOST_PIECES = 4096
"""Copies of one piece each that are issued in a run: what a call costs shows by then."""
MOST_BATCHED = 32768
CHECKED_PIECES = 4096


def memory(address: int, size_bytes: int) -> npt.NDArray[np.uint8]:
    """Host memory as an array that shares it."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(address))


class Memory:
    """What all shapes share: a pool's memory on the device, one on the host, and a stream. Half of each pool's pages
    are moved, so that those which are lie scattered."""

    def __init__(self, runtime: CudaRuntime, moved_bytes: int, seed: int) -> None:
        self.runtime = runtime
        self.moved_bytes = moved_bytes
        self.pool_bytes = 2 * moved_bytes
        self._seed = seed
        self._pinned: list[int] = []
        self._allocated: list[int] = []
        self.device = self._device(self.pool_bytes)
        self.host = self._host(self.pool_bytes)
        self.stream = runtime.create_stream()
        draw = np.random.default_rng(seed)
        words = memory(self.host, self.pool_bytes).view(np.uint64)
        words[:] = draw.integers(0, 1 << 63, len(words), np.uint64)

    def _device(self, size_bytes: int) -> int:
        self._allocated.append(self.runtime.allocate_device(size_bytes))
        return self._allocated[-1]

    def _host(self, size_bytes: int) -> int:
        self._pinned.append(self.runtime.allocate_pinned(size_bytes))
        return self._pinned[-1]

    def to_device(self, array: npt.NDArray[np.uint32]) -> int:
        """The address of a copy on the device."""
        address, staged = self._device(array.nbytes), self.runtime.allocate_pinned(array.nbytes)
        memory(staged, array.nbytes)[:] = array.view(np.uint8)
        self.runtime.copy_async(address, staged, array.nbytes, self.stream)
        self.runtime.synchronize(self.stream)
        self.runtime.free_pinned(staged)
        return address

    def pair(self, shape: Shape) -> PoolPair:
        """Pools of one shape in this memory."""
        return PoolPair(self, shape, np.random.default_rng([self._seed, shape.piece_bytes]))

    def close(self) -> None:
        """Gives everything back."""
        self.runtime.synchronize(self.stream)
        for address in self._allocated:
            self.runtime.free_device(address)
        for address in self._pinned:
            self.runtime.free_pinned(address)
        self.runtime.destroy_stream(self.stream)


@dataclass(frozen=True)
class _Pieces:
    """Addresses of every piece that is moved, [pages * layers * parts]."""

    device: npt.NDArray[np.uint64]
    host: npt.NDArray[np.uint64]


class PoolPair:
    """One shape's pools. Every way moves the same pages, and takes until they are there."""

    def __init__(self, memory: Memory, shape: Shape, draw: np.random.Generator) -> None:
        self._memory, self._runtime, self._shape = memory, memory.runtime, shape
        self.count = shape.pages_of(memory.moved_bytes)
        pages = 2 * self.count
        self._device_layout = Layout.layer_first(shape.layers, shape.parts, pages, shape.piece_bytes)
        self._host_layout = Layout.page_first(shape.layers, shape.parts, shape.piece_bytes, HOST_ALIGNMENT)
        assert pages * self._host_layout.page_stride <= memory.pool_bytes, (
            "pages of a shape fill whole alignments"
        )
        self._device_pages = draw.permutation(pages).astype(np.uint32)
        self._host_pages = draw.permutation(pages).astype(np.uint32)
        self._device_table = memory.to_device(self._device_pages)
        self._host_table = memory.to_device(self._host_pages)
        self.bytes = self.count * shape.page_bytes

    def kernels(self, direction: Direction, blocks: int) -> Callable[[], Sample]:
        """Loads go layer by layer, as they do when a model waits for them; a backup is one launch."""
        return lambda: self._timed(self.bytes, lambda: self.queue(direction, blocks, self._memory.stream))

    def queue(self, direction: Direction, blocks: int, stream: Stream, second_half: bool = False) -> None:
        """Queues one transfer by kernels. ``second_half``: to or from the host's other pages."""
        layers = range(self._shape.layers) if direction == "load" else (0,)
        for layer in layers:
            call = KernelCall(
                kind="load_layer" if direction == "load" else "back_up_all",
                device_address=self._memory.device,
                host_address=self._memory.host,
                device_layout=self._device_layout,
                host_layout=self._host_layout,
                device_pages=self._device_table,
                host_pages=self._host_table + 4 * self.count * second_half,
                count=self.count,
                layer=layer,
                parts=self._shape.parts,
                layers=self._shape.layers,
                blocks=blocks,
            )
            self._runtime.launch(call, stream)

    def pieces(self, direction: Direction) -> Callable[[], Sample]:
        """A copy a piece, for as many pieces as are issued in a run."""
        pieces = self._addresses(MOST_PIECES)
        to, come = (pieces.device, pieces.host) if direction == "load" else (pieces.host, pieces.device)
        pairs = list(zip(to.tolist(), come.tolist(), strict=True))
        size, stream, copy = self._shape.piece_bytes, self._memory.stream, self._runtime.copy_async

        def issue() -> None:
            for destination, source in pairs:
                copy(destination, source, size, stream)

        return lambda: self._timed(len(pairs) * size, issue)

    def batch(self, direction: Direction) -> Callable[[], Sample]:
        """The same copies by calls that take many each."""
        pieces = self._addresses(MOST_BATCHED)
        to, come = (pieces.device, pieces.host) if direction == "load" else (pieces.host, pieces.device)
        size, stream = self._shape.piece_bytes, self._memory.stream
        return lambda: self._timed(len(to) * size, lambda: self._runtime.copy_batch(to, come, size, stream))

    def large(self, direction: Direction) -> Callable[[], Sample]:
        """One copy of as many bytes, contiguous on both sides: what the link can do."""
        ends = (self._memory.device, self._memory.host)
        to, come = ends if direction == "load" else ends[::-1]
        stream = self._memory.stream
        return lambda: self._timed(self.bytes, lambda: self._runtime.copy_async(to, come, self.bytes, stream))

    def ways(self, direction: Direction, blocks: tuple[int, ...]) -> dict[str, Callable[[], Sample]]:
        """All of them by name; `large` is the yardstick."""
        found = {f"kernel_{quota}": self.kernels(direction, quota) for quota in blocks}
        found |= {"pieces": self.pieces(direction), "large": self.large(direction)}
        if self._runtime.has_batched_copies:
            found["batch"] = self.batch(direction)
        return found

    def wrong_pieces(self, load_blocks: int, backup_blocks: int) -> int:
        """Loads, backs up to other host pages, and counts pieces that are not the same bytes in all three places; a
        sample of pages where there are many."""
        shape = self._shape
        pages = min(self.count, max(1, CHECKED_PIECES // (shape.layers * shape.parts)))
        self.queue("load", load_blocks, self._memory.stream)
        self.queue("backup", backup_blocks, self._memory.stream, second_half=True)
        pieces = self._addresses(pages * shape.layers * shape.parts)
        size = shape.piece_bytes
        scratch = self._runtime.allocate_pinned(len(pieces.device) * size)
        for place, source in enumerate(pieces.device.tolist()):
            self._runtime.copy_async(scratch + place * size, source, size, self._memory.stream)
        self._runtime.synchronize(self._memory.stream)
        on_device = memory(scratch, len(pieces.device) * size).reshape(pages, -1)
        on_host = self._host_view()
        first, second = self._host_pages[: self.count][:pages], self._host_pages[self.count :][:pages]
        wrong = sum(
            int((found.reshape(-1, size) != on_host[page].reshape(-1, size)).any(axis=1).sum())
            for pages_there in (first, second)
            for found, page in zip(on_device, pages_there, strict=True)
        )
        self._runtime.free_pinned(scratch)
        return wrong

    def _host_view(self) -> npt.NDArray[np.uint8]:
        """[pages, bytes of a page without its padding]."""
        stride = self._host_layout.page_stride
        return memory(self._memory.host, 2 * self.count * stride).reshape(-1, stride)[
            :, : self._shape.page_bytes
        ]

    def _addresses(self, most: int) -> _Pieces:
        """Pieces in the order of pages, layers, parts; the first ``most`` of them."""
        shape = self._shape
        pages = min(self.count, math.ceil(most / (shape.layers * shape.parts)))
        layers, parts = np.arange(shape.layers, dtype=np.uint64), np.arange(shape.parts, dtype=np.uint64)

        def of(address: int, layout: Layout, ids: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint64]:
            inner = (layers[:, None] * layout.layer_stride + parts * layout.part_stride).reshape(-1)
            starts = ids[:pages].astype(np.uint64) * layout.page_stride + address + layout.base
            return (starts[:, None] + inner).reshape(-1)[:most]

        return _Pieces(
            of(self._memory.device, self._device_layout, self._device_pages),
            of(self._memory.host, self._host_layout, self._host_pages),
        )

    def _timed(self, size_bytes: int, issue: Callable[[], None]) -> Sample:
        began = self._runtime.now()
        issue()
        self._runtime.synchronize(self._memory.stream)
        return Sample(self._runtime.now() - began, size_bytes)
