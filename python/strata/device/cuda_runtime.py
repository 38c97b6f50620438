"""What Strata asks of a CUDA runtime, as a Protocol: streams, events, copies, kernels, pinned memory. `CupyRuntime`
does it on a GPU, `FakeCudaRuntime` in host memory; nothing above this file can tell which.

The rules are CUDA's: what is queued on one stream runs in order, streams know nothing of each other but through events,
a wait covers the record that was the event's latest when the wait was queued, and an event that was never recorded
counts as complete.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType, Protocol

import numpy as np
import numpy.typing as npt
import torch

from strata.device import kernels
from strata.device.kernels import Kind, Layout
from strata.errors import StrataError

Stream = NewType("Stream", int)
"""A stream's address; 0 is the legacy default stream."""
Event = NewType("Event", int)
"""An event's address."""


class DeviceError(StrataError):
    """The device or its driver refused. `fatal`: the device's context is lost, nothing on it will ever answer."""

    def __init__(self, message: str, fatal: bool = False) -> None:
        super().__init__(message)
        self.fatal = fatal


@dataclass(frozen=True)
class KernelCall:
    """One launch of a kernel of `cuda/`. Addresses are in bytes; page tables are uint32 arrays of `count` entries on
    the device; `layer` counts for `load_layer` alone."""

    kind: Kind
    device_address: int
    host_address: int
    device_layout: Layout
    host_layout: Layout
    device_pages: int
    host_pages: int
    count: int
    layer: int
    parts: int
    layers: int
    blocks: int

    def prepared(self) -> tuple[str, tuple[npt.NDArray[np.void]]]:
        """The kernel's name, for the widest words that everything is a multiple of, and its arguments. Raises
        ConfigError for sizes and alignments that no kernel takes."""
        width = kernels.word_bytes(
            self.device_address, self.host_address, self.device_layout, self.host_layout
        )
        arguments = kernels.arguments(
            self.kind,
            self.device_address,
            self.host_address,
            self.device_layout,
            self.host_layout,
            self.device_pages,
            self.host_pages,
            self.count,
            self.layer,
            self.parts,
            self.layers,
        )
        return kernels.kernel_name(self.kind, width, 32), arguments


@dataclass(frozen=True)
class MemoryInfo:
    """Bytes of the device's memory."""

    free: int
    total: int


class CudaRuntime(Protocol):
    """Every call returns at once but `synchronize`, which start-up measurements and shutdowns alone may use. All
    of them raise DeviceError, and any thread may call them once it has called `bind_thread`."""

    def describe(self) -> str:
        """The device in words, for logs and reports."""
        ...

    def bind_thread(self) -> None:
        """Makes the device the calling thread's."""
        ...

    def compute_stream(self) -> Stream:
        """The stream on which the calling thread's model computes."""
        ...

    def create_stream(self, urgent: bool = False) -> Stream:
        """A stream that does not wait for the default one. Blocks of `urgent` kernels are placed before those of others
        that wait for a processor."""
        ...

    def destroy_stream(self, stream: Stream) -> None:
        """Gives a stream back."""
        ...

    def create_event(self) -> Event:
        """An event without timing."""
        ...

    def destroy_event(self, event: Event) -> None:
        """Gives an event back."""
        ...

    def record(self, event: Event, stream: Stream) -> None:
        """Queues the event behind everything that the stream holds."""
        ...

    def stream_wait_event(self, stream: Stream, event: Event) -> None:
        """Whatever is queued on the stream from now on waits for the event's latest record."""
        ...

    def query(self, event: Event) -> bool:
        """Whether the event's latest record has been reached. A failure of anything queued may be raised here."""
        ...

    def launch(self, call: KernelCall, stream: Stream) -> None:
        """Queues a kernel."""
        ...

    def copy_async(self, destination: int, source: int, size_bytes: int, stream: Stream) -> None:
        """Queues one copy between any two of device and pinned memory; the source is read when its turn comes."""
        ...

    @property
    def has_batched_copies(self) -> bool:
        """Whether `copy_batch` works here."""
        ...

    def copy_batch(
        self,
        destinations: npt.NDArray[np.uint64],
        sources: npt.NDArray[np.uint64],
        size_bytes: int,
        stream: Stream,
    ) -> None:
        """Queues many copies of one size, without an order among themselves; sources are read in stream order. The
        arrays may be reused at once."""
        ...

    def allocate_device(self, size_bytes: int) -> int:
        """The address of new device memory."""
        ...

    def free_device(self, address: int) -> None:
        """Gives device memory back."""
        ...

    def allocate_pinned(self, size_bytes: int) -> int:
        """The address of new pinned host memory."""
        ...

    def free_pinned(self, address: int) -> None:
        """Gives pinned memory back."""
        ...

    def allocate_pool(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of zeros in device memory, for the device tier."""
        ...

    def register_host(self, address: int, size_bytes: int) -> None:
        """Pins existing host memory, so that kernels reach it under its own address."""
        ...

    def unregister_host(self, address: int) -> None:
        """Unpins what `register_host` pinned at this address."""
        ...

    def memory_info(self) -> MemoryInfo:
        """What the device has left."""
        ...

    def clear_sticky_error(self) -> None:
        """Forgets a failure that was already raised, so that later calls of anybody do not report it again."""
        ...

    def synchronize(self, stream: Stream) -> None:
        """Waits until the stream is empty."""
        ...

    def now(self) -> float:
        """Seconds on the clock by which this device's work is measured."""
        ...
