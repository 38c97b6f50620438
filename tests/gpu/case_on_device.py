"""A transfer of tests/device/transfer_case.py with its pools where a GPU has them: guards and all, the device's pool in
device memory and the host's in pinned memory. The oracle is the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from transfer_case import Bytes, Case

from strata.device.kernels import arguments, kernel_name


class Accelerator(Protocol):
    """Memory of both kinds, and the kernels."""

    def upload(self, array: npt.NDArray[Any], pinned: bool) -> int:
        """The address of a copy in device or pinned memory, a multiple of 16."""
        ...

    def download(self, address: int, size_bytes: int) -> Bytes:
        """A copy of what is there once all kernels have ended."""
        ...

    def launch(self, name: str, blocks: int, threads: int, arguments: tuple[npt.NDArray[np.void]]) -> None:
        """Queues a kernel."""
        ...


def on_device(case: Case) -> DeviceCase:
    """The same case."""
    return DeviceCase(**{name: getattr(case, name) for name in Case.__dataclass_fields__})


@dataclass(frozen=True)
class DeviceCase(Case):
    """`defects` takes an `Accelerator` in place of the kernels."""

    def run(self, kernels: Any, device: Bytes, host: Bytes) -> int:
        accelerator: Accelerator = kernels
        wholes = [_whole(device), _whole(host)]
        # An address keeps its place behind a multiple of 16.
        pads = [int(whole.ctypes.data) % 16 for whole in wholes]
        copies = [
            accelerator.upload(np.concatenate([np.zeros(pad, np.uint8), whole]), pinned)
            for whole, pad, pinned in zip(wholes, pads, (False, True), strict=True)
        ]
        starts = [
            copy + pad + int(part.ctypes.data - whole.ctypes.data)
            for copy, pad, part, whole in zip(copies, pads, (device, host), wholes, strict=True)
        ]
        tables = [
            accelerator.upload(self._table(pages, others), pinned=False)
            for pages, others in zip((self.device_pages, self.host_pages), self.pool_pages, strict=True)
        ]
        launched = arguments(
            self.kind, *starts, self.device, self.host, *tables, len(self.device_pages), self.layer, self.parts,
            self.layers,
        )  # fmt: skip
        accelerator.launch(
            kernel_name(self.kind, self.word, self.index_bits), self.blocks, self.threads, launched
        )
        for whole, copy, pad in zip(wholes, copies, pads, strict=True):
            whole[:] = accelerator.download(copy, pad + len(whole))[pad:]
        # A GPU does not count the words that it stores; that every one is right and no other changed is compared.
        return len(self.pieces()) * self.device.piece_bytes // self.word


def _whole(part: Bytes) -> Bytes:
    """The memory with its guards."""
    assert isinstance(part.base, np.ndarray)
    whole: Bytes = part.base
    return whole
