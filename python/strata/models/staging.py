"""One copy to the device for all the small arrays of a step: packed in pinned memory, moved without a wait."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

_ALIGNMENT = 16


def to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """The arrays as tensors on `device`, each with its shape and dtype. On a CPU they share the arrays' memory.

    The copy is queued on the current stream; torch keeps the pinned memory from being reused before it is done.
    """
    arrays = [np.ascontiguousarray(array) for array in arrays]
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    packed, places = pack(arrays)
    pinned = torch.empty(len(packed), dtype=torch.uint8, pin_memory=True)
    pinned.numpy()[:] = packed
    return unpack(pinned.to(device, non_blocking=True), arrays, places)


def pack(arrays: Sequence[np.ndarray]) -> tuple[np.ndarray, list[int]]:
    """All bytes in one array, and where each array begins in it."""
    places, end = [], 0
    for array in arrays:
        places.append(end)
        end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    packed = np.zeros(end, np.uint8)
    for array, place in zip(arrays, places, strict=True):
        packed[place : place + array.nbytes] = array.reshape(-1).view(np.uint8)
    return packed, places


def unpack(packed: torch.Tensor, arrays: Sequence[np.ndarray], places: Sequence[int]) -> list[torch.Tensor]:
    """Views of `packed` [bytes] with the arrays' shapes and dtypes."""
    return [
        packed[place : place + array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
        for array, place in zip(arrays, places, strict=True)
    ]
