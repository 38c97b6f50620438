"""Tells a device of host memory that exists already: in chunks, since drivers refuse large ones; all or nothing."""

from __future__ import annotations

import logging
import resource

from strata.device.cuda_runtime import CudaRuntime, DeviceError
from strata.errors import CapacityError

_log = logging.getLogger("strata.device")

CHUNK_BYTES = 1 << 30


class HostRegistration:
    """A span of host memory, pinned from `pin` to `unpin`."""

    def __init__(self, runtime: CudaRuntime, address: int, size_bytes: int, page_stride: int) -> None:
        self._runtime = runtime
        self._address = address
        self._size_bytes = size_bytes
        # A copy may not cross from one registration into the next, so no page lies in two chunks.
        self._chunk = max(1, CHUNK_BYTES // page_stride) * page_stride
        self._pinned: list[int] = []

    def pin(self) -> None:
        """Pins all of it. Raises CapacityError with both sizes and the remedies; then nothing is pinned."""
        pinned_bytes = 0
        while pinned_bytes < self._size_bytes:
            address = self._address + pinned_bytes
            size = min(self._chunk, self._size_bytes - pinned_bytes)
            try:
                self._runtime.register_host(address, size)
            except DeviceError as error:
                self._runtime.clear_sticky_error()
                self.unpin()
                raise CapacityError(
                    f"the driver pins {pinned_bytes:,} of the {self._size_bytes:,} bytes of --host-memory and refuses "
                    f"{size:,} more ({error}); memory that this process may lock (ulimit -l): {_locked_limit()}. Give "
                    "a smaller --host-memory, raise that limit, or leave the machine (or container) more free memory"
                ) from error
            self._pinned.append(address)
            pinned_bytes += size

    def unpin(self) -> None:
        """Unpins what is pinned; may be called again. What the driver refuses stays pinned, and is logged."""
        while self._pinned:
            address = self._pinned.pop()
            try:
                self._runtime.unregister_host(address)
            except DeviceError as error:
                self._runtime.clear_sticky_error()
                _log.warning("host memory at %#x stays pinned: %s", address, error)


def _locked_limit() -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "no limit" if soft == resource.RLIM_INFINITY else f"{soft:,} bytes"
