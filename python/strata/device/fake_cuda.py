"""A `CudaRuntime` in plain host memory, for machines without a GPU. It is as unhelpful as the rules allow:

- What is queued runs late, a little at a time and in any order that streams and events permit, drawn from a seed; some
  streams are slow throughout.
- Kernels and copies read their page tables and sources when their turn comes, piece by piece.
- Memory that nobody allocated, pinned or registered is out of bounds: touching it loses the device, as it would there.
- It fails on cue: the n-th call of a method.
"""

from __future__ import annotations

import ctypes
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch

from strata.device import kernels
from strata.device.cpu_kernels import CpuKernels
from strata.device.cuda_runtime import DeviceError, Event, KernelCall, MemoryInfo, Stream

_HOST_SYNCHRONOUS = Stream(1)
"""The compute stream of a model that runs on the host: what is queued there has run when the call returns."""
_PACES = (0.02, 0.3, 1.0)
_PAGES_A_TURN = 2


@dataclass
class _Wait:
    """Holds a stream until an event has been recorded so often."""

    event: Event
    version: int


@dataclass
class _Command:
    """Something that runs in turns; `seconds` is what a turn takes on the fake's clock."""

    turns: Iterator[None]
    seconds: float


@dataclass
class _Queue:
    """A stream: what waits on it, and how readily it is run."""

    pace: float
    items: deque[_Wait | _Command] = field(default_factory=deque)


@dataclass
class _Progress:
    """Records of an event that were queued and that were reached."""

    queued: int = 0
    reached: int = 0


def flat_cost(kind: str, blocks: int, size_bytes: int) -> float:
    """Seconds that a command takes on the fake's clock, by default the same whatever it is."""
    return 1e-5


class FakeCudaRuntime:
    """The fake. All methods may be called from any thread.

    `fail` names a method and which of its calls (from 1) fails: {"launch": 3}. With `lose_on` a failing call of one of
    these methods loses the device. `cpu_kernels` runs the kernels of `cuda/`, numpy's stand-in does otherwise.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        cpu_kernels: CpuKernels | None = None,
        fail: dict[str, int] | None = None,
        lose_on: tuple[str, ...] = ("query",),
        batched_copies: bool = True,
        cost: Callable[[str, int, int], float] = flat_cost,
        total_bytes: int = 1 << 30,
    ) -> None:
        self._random = random.Random(seed)
        self._kernels = cpu_kernels
        self._fail = dict(fail or {})
        self._lose_on = lose_on
        self._batched_copies = batched_copies
        self._cost = cost
        self._total_bytes = total_bytes
        self._lock = threading.RLock()
        self._queues: dict[Stream, _Queue] = {}
        self._events: dict[Event, _Progress] = {}
        self._memory: dict[int, int] = {}
        self._owned: dict[int, npt.NDArray[np.uint8]] = {}
        self._next = 16
        self._clock = 0.0
        self.calls: dict[str, int] = {}
        """How often each method that can fail was called."""
        self.lost: str | None = None
        """Why the device is lost, if it is."""
        self.sticky_errors = 0
        """Failures that were raised and not cleared since."""
        self.registered: dict[int, int] = {}
        """Host memory that is registered: address and bytes."""

    # --- what tests ask ----------------------------------------------------------------------------------------

    def fail_next(self, method: str, calls: int = 1) -> None:
        """The call of this method after `calls - 1` others fails."""
        with self._lock:
            self._fail[method] = self.calls.get(method, 0) + calls

    def run(self, stream: Stream, function: Callable[[], None]) -> None:
        """Queues a function of the host: what a model's kernel would do."""

        def turns() -> Iterator[None]:
            function()
            yield

        with self._lock:
            self._enqueue(stream, _Command(turns(), 0.0))

    def drain(self) -> None:
        """Runs everything that is queued, in some order."""
        with self._lock:
            while self._turn(any_pace=True):
                pass

    @property
    def is_empty(self) -> bool:
        """Whether nothing is queued."""
        with self._lock:
            return not any(queue.items for queue in self._queues.values())

    # --- the runtime -------------------------------------------------------------------------------------------

    def describe(self) -> str:
        """What it is."""
        return "no GPU: a stand-in for tests in host memory"

    def bind_thread(self) -> None:
        """Nothing to bind."""

    def compute_stream(self) -> Stream:
        """A stream for a model that computes on the host."""
        with self._lock:
            self._queues.setdefault(_HOST_SYNCHRONOUS, _Queue(1.0))
            return _HOST_SYNCHRONOUS

    def create_stream(self, urgent: bool = False) -> Stream:
        """A stream with a pace of its own, urgent or not."""
        with self._lock:
            self._called("create_stream")
            stream = Stream(self._number())
            self._queues[stream] = _Queue(self._random.choice(_PACES))
            return stream

    def destroy_stream(self, stream: Stream) -> None:
        """Gives a stream back; what it holds runs before, as it would there."""
        with self._lock:
            self._called("destroy_stream")
            self._drain_stream(stream)
            del self._queues[stream]

    def create_event(self) -> Event:
        """An event that was never recorded."""
        with self._lock:
            self._called("create_event")
            event = Event(self._number())
            self._events[event] = _Progress()
            return event

    def destroy_event(self, event: Event) -> None:
        """Gives an event back."""
        with self._lock:
            del self._events[event]

    def record(self, event: Event, stream: Stream) -> None:
        """Queues a record."""
        with self._lock:
            self._called("record")
            progress = self._events[event]
            progress.queued += 1
            version = progress.queued

            def turns() -> Iterator[None]:
                progress.reached = max(progress.reached, version)
                yield

            self._enqueue(stream, _Command(turns(), 0.0))

    def stream_wait_event(self, stream: Stream, event: Event) -> None:
        """Queues a wait for the latest record."""
        with self._lock:
            self._called("stream_wait_event")
            self._enqueue(stream, _Wait(event, self._events[event].queued))

    def query(self, event: Event) -> bool:
        """Whether the latest record was reached; lets some of what is queued run."""
        with self._lock:
            self._called("query")
            self._let_run(4)
            progress = self._events[event]
            return progress.reached >= progress.queued

    def launch(self, call: KernelCall, stream: Stream) -> None:
        """Queues a kernel; it runs some pages at a time."""
        with self._lock:
            self._called("launch")
            size = call.count * call.parts * call.device_layout.piece_bytes
            size *= 1 if call.kind == "load_layer" else call.layers
            self._enqueue(
                stream, _Command(self._kernel_turns(call), self._cost(call.kind, call.blocks, size))
            )

    def copy_async(self, destination: int, source: int, size_bytes: int, stream: Stream) -> None:
        """Queues a copy."""
        with self._lock:
            self._called("copy_async")
            turns = self._copy_turns([(destination, source)], size_bytes)
            self._enqueue(stream, _Command(turns, self._cost("copy", 0, size_bytes)))

    @property
    def has_batched_copies(self) -> bool:
        """As it was made."""
        return self._batched_copies

    def copy_batch(
        self,
        destinations: npt.NDArray[np.uint64],
        sources: npt.NDArray[np.uint64],
        size_bytes: int,
        stream: Stream,
    ) -> None:
        """Queues copies, in any order among themselves."""
        with self._lock:
            self._called("copy_batch")
            pairs = list(zip(destinations.tolist(), sources.tolist(), strict=True))
            self._random.shuffle(pairs)
            seconds = self._cost("batch", len(pairs), size_bytes * len(pairs))
            self._enqueue(stream, _Command(self._copy_turns(pairs, size_bytes), seconds))

    def allocate_device(self, size_bytes: int) -> int:
        """Memory of its own, filled with what no page table holds."""
        with self._lock:
            self._called("allocate_device")
            return self._allocate(size_bytes)

    def free_device(self, address: int) -> None:
        """Gives it back."""
        with self._lock:
            del self._owned[address], self._memory[address]

    def allocate_pinned(self, size_bytes: int) -> int:
        """Memory of its own."""
        with self._lock:
            self._called("allocate_pinned")
            return self._allocate(size_bytes)

    def free_pinned(self, address: int) -> None:
        """Gives it back."""
        self.free_device(address)

    def allocate_pool(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor in host memory."""
        with self._lock:
            self._called("allocate_pool")
            pool = torch.zeros(shape, dtype=dtype)
            self._memory[pool.data_ptr()] = pool.nbytes
            return pool

    def register_host(self, address: int, size_bytes: int) -> None:
        """Makes host memory reachable."""
        with self._lock:
            self._called("register_host")
            self.registered[address] = self._memory[address] = size_bytes

    def unregister_host(self, address: int) -> None:
        """Makes it out of bounds."""
        with self._lock:
            self._called("unregister_host")
            del self.registered[address], self._memory[address]

    def memory_info(self) -> MemoryInfo:
        """What it was made with, less what is allocated."""
        used = sum(size for address, size in self._memory.items() if address not in self.registered)
        return MemoryInfo(max(0, self._total_bytes - used), self._total_bytes)

    def clear_sticky_error(self) -> None:
        """Forgets."""
        self.sticky_errors = 0

    def synchronize(self, stream: Stream) -> None:
        """Runs until the stream is empty."""
        with self._lock:
            self._called("synchronize")
            self._drain_stream(stream)

    def now(self) -> float:
        """The fake's own clock: the cost of all that has run."""
        return self._clock

    # --- how it runs -------------------------------------------------------------------------------------------

    def _called(self, method: str) -> None:
        self.calls[method] = self.calls.get(method, 0) + 1
        if self.lost is not None:
            self.sticky_errors += 1
            raise DeviceError(f"the device is lost: {self.lost}", fatal=True)
        if self._fail.get(method) == self.calls[method]:
            self.sticky_errors += 1
            reason = f"{method} fails on cue"
            if method in self._lose_on:
                self._lose(reason)
            raise DeviceError(reason, fatal=method in self._lose_on)

    def _lose(self, reason: str) -> None:
        """Nothing that is queued ever runs."""
        self.lost = reason
        for queue in self._queues.values():
            queue.items.clear()

    def _number(self) -> int:
        self._next += 1
        return self._next

    def _allocate(self, size_bytes: int) -> int:
        memory = np.full(size_bytes, 0xEE, dtype=np.uint8)
        address = int(memory.ctypes.data)
        self._owned[address], self._memory[address] = memory, size_bytes
        return address

    def _enqueue(self, stream: Stream, item: _Wait | _Command) -> None:
        self._queues[stream].items.append(item)
        if stream == _HOST_SYNCHRONOUS:
            self._drain_stream(stream)
        else:
            self._let_run(2)

    def _let_run(self, most: int) -> None:
        for _ in range(self._random.randint(0, most)):
            self._turn()

    def _drain_stream(self, stream: Stream) -> None:
        while self._queues[stream].items:
            # A turn in which nothing runs may still have passed the last wait.
            if not self._turn(any_pace=True) and self._queues[stream].items:
                raise DeviceError(
                    "streams wait for each other in a circle" if self.lost is None else self.lost
                )

    def _turn(self, any_pace: bool = False) -> bool:
        """Runs one turn of one stream that can go on, if a stream feels like it."""
        able = [queue for queue in self._queues.values() if self._can_run(queue)]
        if not able:
            return False
        queue = self._random.choice(able)
        if not any_pace and self._random.random() > queue.pace:
            return True
        head = queue.items[0]
        assert isinstance(head, _Command), "waits are passed by `_can_run`"
        try:
            next(head.turns)
        except StopIteration:
            self._clock += head.seconds
            if queue.items and queue.items[0] is head:
                queue.items.popleft()
        return True

    def _can_run(self, queue: _Queue) -> bool:
        while queue.items and isinstance(head := queue.items[0], _Wait):
            progress = self._events.get(head.event)
            if progress is not None and progress.reached < head.version:
                return False
            queue.items.popleft()
        return bool(queue.items)

    def _kernel_turns(self, call: KernelCall) -> Iterator[None]:
        for first in range(0, call.count, _PAGES_A_TURN):
            part = replace(
                call,
                device_pages=call.device_pages + 4 * first,
                host_pages=call.host_pages + 4 * first,
                count=min(_PAGES_A_TURN, call.count - first),
            )
            pieces = self._pieces(part)
            if self.lost is not None:
                return
            if self._kernels is None:
                for destination, source in pieces:
                    ctypes.memmove(destination, source, call.device_layout.piece_bytes)
            else:
                _run_kernel(self._kernels, part)
            yield

    def _pieces(self, call: KernelCall) -> list[tuple[int, int]]:
        """(destination, source) of every piece, all of them in bounds unless that loses the device."""
        tables = []
        for address in (call.device_pages, call.host_pages):
            if not self._is_inside(address, 4 * call.count):
                return []
            tables.append(list((ctypes.c_uint32 * call.count).from_address(address)))
        layers = range(call.layer, call.layer + 1) if call.kind == "load_layer" else range(call.layers)
        found = []
        for layer in layers:
            for part in range(call.parts):
                for device_page, host_page in zip(*tables, strict=True):
                    device = call.device_address + _offset(call.device_layout, layer, part, device_page)
                    host = call.host_address + _offset(call.host_layout, layer, part, host_page)
                    size = call.device_layout.piece_bytes
                    if not (self._is_inside(device, size) and self._is_inside(host, size)):
                        return []
                    found.append((host, device) if call.kind == "back_up_all" else (device, host))
        return found

    def _copy_turns(self, pairs: list[tuple[int, int]], size_bytes: int) -> Iterator[None]:
        for destination, source in pairs:
            if not (self._is_inside(destination, size_bytes) and self._is_inside(source, size_bytes)):
                return
            ctypes.memmove(destination, source, size_bytes)
            yield

    def _is_inside(self, address: int, size_bytes: int) -> bool:
        """Whether all of a span may be touched; the device is lost if not."""
        for start, size in self._memory.items():
            if start <= address and address + size_bytes <= start + size:
                return True
        self._lose(f"illegal access to {size_bytes} bytes at {address:#x}")
        return False


def _offset(layout: kernels.Layout, layer: int, part: int, page: int) -> int:
    return layout.base + layer * layout.layer_stride + part * layout.part_stride + page * layout.page_stride


def _run_kernel(cpu_kernels: CpuKernels, call: KernelCall) -> None:
    name, arguments = call.prepared()
    # Fewer threads than on a device: a grid is a loop here, and most of them would find nothing to do.
    cpu_kernels.launch(name, call.blocks, arguments, threads=32)
