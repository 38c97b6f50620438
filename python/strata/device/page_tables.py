"""Page tables on their way to the device: pairs of a pinned and a device buffer. A pair serves one transfer at a time,
from `take` until its user says that the device has let go of it: the copy reads the pinned half late, kernels read the
other half to their end.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from strata.device.cuda_runtime import CudaRuntime, Stream

ID_BYTES = 4
"""Page ids are uint32."""
_LEAST_IDS = 1024


@dataclass(frozen=True)
class PageTable:
    """Room for two tables of `ids` page ids each, one behind the other, in both buffers."""

    pinned: int
    device: int
    ids: int

    def send(
        self,
        runtime: CudaRuntime,
        device_pages: npt.NDArray[np.uint32],
        host_pages: npt.NDArray[np.uint32],
        stream: Stream,
    ) -> tuple[int, int]:
        """Queues both tables' way to the device; returns where they will be there."""
        count = len(device_pages)
        memory = (ctypes.c_uint32 * (2 * count)).from_address(self.pinned)
        both = np.ctypeslib.as_array(memory)
        both[:count], both[count:] = device_pages, host_pages
        runtime.copy_async(self.device, self.pinned, 2 * count * ID_BYTES, stream)
        return self.device, self.device + count * ID_BYTES


class PageTables:
    """At most `most` pairs, made as they are needed and kept for the next transfer."""

    def __init__(self, runtime: CudaRuntime, most: int) -> None:
        self._runtime = runtime
        self._most = most
        self._free: list[PageTable] = []
        self._used = 0

    @property
    def has_room(self) -> bool:
        """Whether `take` may be called."""
        return self._used < self._most

    def take(self, ids: int) -> PageTable:
        """A pair with room for two tables of so many ids. Raises DeviceError if there is no memory."""
        fitting = [table for table in self._free if table.ids >= ids]
        if fitting:
            table = min(fitting, key=lambda table: table.ids)
            self._free.remove(table)
        else:
            if self._free and self._used + len(self._free) >= self._most:
                self._give_back(self._free.pop())
            table = self._make(1 << max(_LEAST_IDS - 1, ids - 1).bit_length())
        self._used += 1
        return table

    def release(self, table: PageTable) -> None:
        """The device has let go of it."""
        self._used -= 1
        self._free.append(table)

    def close(self) -> None:
        """Gives all buffers back; none may be in use."""
        while self._free:
            self._give_back(self._free.pop())

    def _make(self, ids: int) -> PageTable:
        size = 2 * ids * ID_BYTES
        pinned = self._runtime.allocate_pinned(size)
        return PageTable(pinned, self._runtime.allocate_device(size), ids)

    def _give_back(self, table: PageTable) -> None:
        self._runtime.free_device(table.device)
        self._runtime.free_pinned(table.pinned)
