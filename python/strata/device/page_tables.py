"""Page tables on their way to the device: pairs of a pinned and a device buffer. A pair serves one transfer at a time,
from `take` until its user says that the device has let go of it: the copy reads the pinned half late, kernels read the
other half to their end.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from strata.device.cuda_runtime import CudaRuntime, DeviceError, Stream
from strata.errors import CapacityError

ID_BYTES = 4
"""Page ids are uint32."""


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
    """`most` pairs for transfers of up to `ids` pages. All are made before the first transfer: memory that is allocated
    or freed on a device in use makes it wait."""

    def __init__(self, runtime: CudaRuntime, most: int, ids: int) -> None:
        self._runtime = runtime
        self._most = most
        self._ids = ids
        self._free: list[PageTable] = []

    @property
    def has_room(self) -> bool:
        """Whether `take` may be called."""
        return bool(self._free)

    def prepare(self) -> None:
        """Makes all pairs. Raises CapacityError with what they need; `close` gives back those that were made."""
        while len(self._free) < self._most:
            try:
                self._free.append(self._make())
            except DeviceError as error:
                if error.fatal:
                    raise
                self._runtime.clear_sticky_error()
                size = 2 * self._ids * ID_BYTES
                raise CapacityError(
                    f"no memory for {self._most} page tables of {size:,} bytes each, pinned and on the device ({error})"
                    ": give a smaller --device-memory"
                ) from error

    def take(self, ids: int) -> PageTable:
        """A pair with room for two tables of so many ids. Raises DeviceError where no transfer is that long."""
        if ids > self._ids:
            raise DeviceError(
                f"a transfer of {ids} pages: no more than the device's {self._ids} can move at once"
            )
        return self._free.pop()

    def release(self, table: PageTable) -> None:
        """The device has let go of it."""
        self._free.append(table)

    def close(self) -> None:
        """Gives all buffers back; none may be in use."""
        while self._free:
            table = self._free.pop()
            self._runtime.free_device(table.device)
            self._runtime.free_pinned(table.pinned)

    def _make(self) -> PageTable:
        size = 2 * self._ids * ID_BYTES
        pinned = self._runtime.allocate_pinned(size)
        try:
            return PageTable(pinned, self._runtime.allocate_device(size), self._ids)
        except BaseException:
            self._runtime.free_pinned(pinned)
            raise
