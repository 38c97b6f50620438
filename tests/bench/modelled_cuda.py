"""A CUDA runtime for the proof's own tests: bytes really move, at once, in host memory; time is reckoned from rates
that a test sets, on a clock of its own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from strata.device.cuda_runtime import Event, KernelCall, MemoryInfo, Stream

CALL_S = 1e-6
COMPUTE = Stream(0)


@dataclass
class ModelledCuda:
    """`CudaRuntime`. ``kernel_share(piece, blocks)``: a kernel's rate as a share of ``link``'s bytes a second.
    ``slowed``: what compute takes while a copy is under way, as a multiple. ``corrupts``: kernels get a piece wrong."""

    link: float = 50e9
    kernel_share: Callable[[int, int], float] = lambda piece, blocks: 0.95
    slowed: float = 1.0
    corrupts: bool = False
    has_batched_copies: bool = True
    calls: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._clock = 0.0
        self._busy: dict[Stream, float] = {COMPUTE: 0.0}
        self._events: dict[Event, float] = {}
        self._memory: dict[int, npt.NDArray[np.uint8]] = {}
        self._names = 0

    def describe(self) -> str:
        return "a modelled GPU"

    def bind_thread(self) -> None:
        self.calls.append("bind_thread")

    def compute_stream(self) -> Stream:
        return COMPUTE

    def create_stream(self) -> Stream:
        self._names += 1
        self._busy[Stream(self._names)] = 0.0
        return Stream(self._names)

    def destroy_stream(self, stream: Stream) -> None:
        del self._busy[stream]

    def create_event(self) -> Event:
        self._names += 1
        return Event(self._names)

    def destroy_event(self, event: Event) -> None:
        self._events.pop(event, None)

    def record(self, event: Event, stream: Stream) -> None:
        self._events[event] = self._busy[stream]

    def stream_wait_event(self, stream: Stream, event: Event) -> None:
        self._busy[stream] = max(self._busy[stream], self._events.get(event, 0.0))

    def query(self, event: Event) -> bool:
        return self._events.get(event, 0.0) <= self._clock

    def launch(self, call: KernelCall, stream: Stream) -> None:
        tables = (call.device_pages, call.host_pages)
        device_ids, host_ids = (
            np.ctypeslib.as_array((ctypes.c_uint32 * call.count).from_address(table)) for table in tables
        )
        layers = range(call.layers) if call.kind != "load_layer" else (call.layer,)
        size = call.device_layout.piece_bytes
        for layer in layers:
            for part in range(call.parts):
                for device_id, host_id in zip(device_ids.tolist(), host_ids.tolist(), strict=True):
                    device, host = (
                        address + layout.base + layer * layout.layer_stride + part * layout.part_stride
                        + page * layout.page_stride
                        for address, layout, page in (
                            (call.device_address, call.device_layout, device_id),
                            (call.host_address, call.host_layout, host_id),
                        )
                    )  # fmt: skip
                    to, come = (host, device) if call.kind == "back_up_all" else (device, host)
                    ctypes.memmove(to, come, size)
        if self.corrupts and call.kind == "load_layer" and call.layer == 1:
            ctypes.memset(call.device_address + call.device_layout.layer_stride, 0, 8 * size)
        moved = size * call.parts * call.count * len(layers)
        self._queue(stream, moved / (self.link * self.kernel_share(size, call.blocks)))

    def copy_async(self, destination: int, source: int, size_bytes: int, stream: Stream) -> None:
        ctypes.memmove(destination, source, size_bytes)
        self._queue(stream, CALL_S + size_bytes / self.link)

    def copy_batch(
        self,
        destinations: npt.NDArray[np.uint64],
        sources: npt.NDArray[np.uint64],
        size_bytes: int,
        stream: Stream,
    ) -> None:
        for destination, source in zip(destinations.tolist(), sources.tolist(), strict=True):
            ctypes.memmove(destination, source, size_bytes)
        self._queue(stream, size_bytes * len(sources) / (0.5 * self.link))

    def compute(self, seconds: float) -> None:
        """Queues work of a model: a test's loop calls this."""
        start = max(self._clock, self._busy[COMPUTE])
        disturbed = any(end > start for stream, end in self._busy.items() if stream != COMPUTE)
        self._queue(COMPUTE, seconds * (self.slowed if disturbed else 1.0))

    def allocate_device(self, size_bytes: int) -> int:
        return self._allocate(size_bytes)

    def free_device(self, address: int) -> None:
        del self._memory[address]

    def allocate_pinned(self, size_bytes: int) -> int:
        return self._allocate(size_bytes)

    def free_pinned(self, address: int) -> None:
        del self._memory[address]

    def register_host(self, address: int, size_bytes: int) -> None:
        raise NotImplementedError

    def unregister_host(self, address: int) -> None:
        raise NotImplementedError

    def memory_info(self) -> MemoryInfo:
        return MemoryInfo(1 << 30, 1 << 30)

    def clear_sticky_error(self) -> None:
        """Nothing sticks."""

    def synchronize(self, stream: Stream) -> None:
        self._clock = max(self._clock, self._busy[stream])

    def now(self) -> float:
        return self._clock

    @property
    def held(self) -> int:
        """Allocations that were not given back."""
        return len(self._memory)

    def _allocate(self, size_bytes: int) -> int:
        array = np.zeros(size_bytes + 16, np.uint8)
        address = array.ctypes.data
        self._memory[address] = array
        return address

    def _queue(self, stream: Stream, seconds: float) -> None:
        self._clock += CALL_S
        self._busy[stream] = max(self._clock, self._busy[stream]) + seconds
