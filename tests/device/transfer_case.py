"""One transfer on plain memory, and what is wrong with the bytes after it; numpy's slices are the oracle."""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from strata.device.cpu_kernels import CpuKernels
from strata.device.kernels import THREADS, IndexBits, Kind, Layout, WordBytes, arguments, kernel_name

Bytes = npt.NDArray[np.uint8]

# Around each pool; what a wrong offset of a small case hits is a guard, not another object of the process.
GUARD_BYTES = 1 << 18
# Behind each page table: a thread that reads on takes a wrong page, not the end of memory.
GUARD_ENTRIES = 8


def end_of(layout: Layout, layers: int, parts: int, pages: int) -> int:
    """The first byte behind the last piece."""
    last = (layers - 1) * layout.layer_stride + (parts - 1) * layout.part_stride
    return layout.base + last + (pages - 1) * layout.page_stride + layout.piece_bytes


def filled(size: int, shift: int, generator: np.random.Generator) -> tuple[Bytes, Bytes]:
    """Random memory between guards, and the part from `shift` bytes behind a multiple of 16 on, `size` bytes long."""
    whole = generator.integers(0, 256, size + shift + 2 * GUARD_BYTES + 16, dtype=np.uint8)
    start = GUARD_BYTES + (-(whole.ctypes.data + GUARD_BYTES)) % 16 + shift
    return whole, whole[start : start + size]


@dataclass(frozen=True)
class Case:
    """A transfer. Page ids of both sides stand in the order in which they are moved."""

    kind: Kind
    layers: int
    parts: int
    device: Layout
    host: Layout
    device_pages: tuple[int, ...]
    host_pages: tuple[int, ...]
    pool_pages: tuple[int, int]  # device's, host's
    word: WordBytes = 4
    index_bits: IndexBits = 32
    layer: int = 0
    blocks: int = 2
    threads: int = THREADS
    seed: int = 0
    shifts: tuple[int, int] = field(default=(0, 0))  # addresses of device and host, behind a multiple of 16

    def moved_layers(self) -> list[int]:
        return [self.layer] if self.kind == "load_layer" else list(range(self.layers))

    def pieces(self) -> list[tuple[int, int]]:
        """(offset on the device, offset on the host) of each piece, by words and slices rather than by the rule of
        cuda/address.h."""
        found = []
        for device_page, host_page in zip(self.device_pages, self.host_pages, strict=True):
            for layer in self.moved_layers():
                for part in range(self.parts):
                    ends = []
                    for layout, page in ((self.device, device_page), (self.host, host_page)):
                        strides = (layout.layer_stride, layout.part_stride, layout.page_stride)
                        ends.append(layout.base + int(np.dot(strides, (layer, part, page))))
                    found.append((ends[0], ends[1]))
        return found

    def _table(self, pages: tuple[int, ...], others: int) -> npt.NDArray[np.uint64 | np.uint32]:
        dtype = np.uint32 if self.index_bits == 32 else np.uint64
        unused = next((page for page in range(others) if page not in pages), 0)
        return np.array([*pages, *[unused] * GUARD_ENTRIES], dtype=dtype)

    def run(self, kernels: CpuKernels, device: Bytes, host: Bytes) -> int:
        """Launch on two pools; returns the words stored."""
        tables = (
            self._table(self.device_pages, self.pool_pages[0]),
            self._table(self.host_pages, self.pool_pages[1]),
        )
        launched = arguments(
            self.kind,
            device.ctypes.data,
            host.ctypes.data,
            self.device,
            self.host,
            tables[0].ctypes.data,
            tables[1].ctypes.data,
            len(self.device_pages),
            self.layer,
            self.parts,
            self.layers,
        )
        name = kernel_name(self.kind, self.word, self.index_bits)
        return kernels.launch(name, self.blocks, launched, threads=self.threads, seed=self.seed)

    def defects(self, kernels: CpuKernels, generator_seed: int = 1) -> list[str]:
        """What a launch did wrong: nothing for kernels that keep their promise."""
        generator = np.random.default_rng(generator_seed)
        sizes = [
            end_of(layout, self.layers, self.parts, pages)
            for layout, pages in ((self.device, self.pool_pages[0]), (self.host, self.pool_pages[1]))
        ]
        device_whole, device = filled(sizes[0], self.shifts[0], generator)
        host_whole, host = filled(sizes[1], self.shifts[1], generator)
        wanted_device, wanted_host = device_whole.copy(), host_whole.copy()
        device_start = device.ctypes.data - device_whole.ctypes.data
        host_start = host.ctypes.data - host_whole.ctypes.data
        piece = self.device.piece_bytes
        pieces = self.pieces()
        for device_offset, host_offset in pieces:
            on_device = slice(device_start + device_offset, device_start + device_offset + piece)
            on_host = slice(host_start + host_offset, host_start + host_offset + piece)
            if self.kind == "back_up_all":
                wanted_host[on_host] = device_whole[on_device]
            else:
                wanted_device[on_device] = host_whole[on_host]
        stored = self.run(kernels, device, host)
        found = []
        if stored != len(pieces) * piece // self.word:
            found.append(f"{stored} words stored for {len(pieces)} pieces of {piece} bytes")
        for name, whole, wanted in (
            ("device", device_whole, wanted_device),
            ("host", host_whole, wanted_host),
        ):
            if not np.array_equal(whole, wanted):
                wrong = np.flatnonzero(whole != wanted)
                found.append(f"{len(wrong)} bytes of the {name}'s memory are wrong, from {wrong[0]} on")
        return found


def sparse_zeros(size: int) -> Bytes:
    """Zeros of any size; only what is written takes memory."""
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)  # named by Python since 3.13
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    return np.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=np.uint8)


def defects_far_out(kernels: CpuKernels) -> list[str]:
    """What is wrong with a load between two pools of 20 GiB each, in which every index reaches beyond 32 bits."""
    gib = 1 << 30
    device, host = Layout(64, 10 * gib, 5 * gib, gib, 48), Layout(32, 5 * gib, 64, 10 * gib, 48)
    device_memory, host_memory = sparse_zeros(20 * gib), sparse_zeros(20 * gib)
    case = Case("load_all", 2, 2, device, host, (1, 0), (0, 1), (2, 2), word=16)
    for number, (_, start) in enumerate(case.pieces(), start=1):
        host_memory[start : start + 48] = number
    case.run(kernels, device_memory, host_memory)
    return [
        f"piece {number} did not arrive at {start}"
        for number, (start, _) in enumerate(case.pieces(), start=1)
        if set(device_memory[start : start + 48].tolist()) != {number}
    ]
