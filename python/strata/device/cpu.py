"""The device tier of a machine without a GPU: plain memory, committed as it is first used.

The pool is layer-first, `[layer][part][page][token][head][dim]`; strata-copy's threads move pages between it and
the host tier by the same address rule that `cuda/` states for kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from strata.errors import CapacityError


@dataclass(frozen=True)
class CpuPool:
    """`tensor` has the pool's shape and dtype; `address` and `size_bytes` are its memory's."""

    tensor: torch.Tensor
    address: int
    size_bytes: int

    @classmethod
    def allocate(cls, shape: tuple[int, ...], dtype: torch.dtype) -> CpuPool:
        """A pool of zeros. Raises CapacityError if the system does not even promise the memory."""
        size_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        try:
            # numpy's zeros come from calloc: pages that are never used are never committed.
            memory = np.zeros(size_bytes, dtype=np.uint8)
        except MemoryError as error:
            raise CapacityError(
                f"the system refuses {size_bytes} bytes for the device tier; give a smaller --device-memory"
            ) from error
        tensor = torch.from_numpy(memory).view(dtype).view(shape)
        return cls(tensor, tensor.data_ptr(), size_bytes)
