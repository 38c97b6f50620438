"""The memory that a foreign engine computes from, as Strata has to know it: where it lies and how it is cut."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from strata.errors import ConfigError


class Tensor(Protocol):
    """What is used of a `torch.Tensor`."""

    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def dtype(self) -> Any: ...
    @property
    def device(self) -> Any: ...
    def data_ptr(self) -> int: ...
    def element_size(self) -> int: ...
    def is_contiguous(self) -> bool: ...


@dataclass(frozen=True)
class Pool:
    """A pool of `pages` pages of `page_size` tokens, layer-first: `[layer][part][page][...]`, the rest of a page's
    bytes in any order. `size_bytes` bytes from `address` on, memory of `owner`."""

    address: int
    size_bytes: int
    layers: int
    parts: int
    pages: int
    page_size: int
    token_bytes: int
    dtype: str
    inner: tuple[int, ...]
    device: str
    owner: object

    @classmethod
    def of(cls, memory: Tensor | npt.NDArray[Any], page_size: int) -> Pool:
        """The pool in `memory`: a contiguous tensor or a numpy array of shape `[layers, parts, pages, page_size,
        ...]`, where `parts` is 2 for K and V. Raises ConfigError for any other."""
        if isinstance(memory, np.ndarray):
            address, item = memory.ctypes.data, memory.itemsize
            contiguous, writable = memory.flags.c_contiguous, memory.flags.writeable
            device = "cpu"
        else:
            address, item = memory.data_ptr(), memory.element_size()
            contiguous, writable = memory.is_contiguous(), True
            device = str(memory.device)
        shape = tuple(int(size) for size in memory.shape)
        if len(shape) < 4 or page_size < 1 or page_size not in shape[3:] or math.prod(shape) == 0:
            raise ConfigError(
                f"a pool of shape {list(shape)} is not [layers, parts, pages, page_size, ...] with a page_size of "
                f"{page_size}: one dimension after the first three must be the {page_size} tokens of a page"
            )
        if not contiguous or not writable:
            raise ConfigError(
                f"the pool of shape {list(shape)} is a view with gaps or cannot be written: give the whole tensor, "
                "contiguous and layer-first"
            )
        layers, parts, pages, *inner = shape
        token_bytes = math.prod(inner) // page_size * item
        size = math.prod(shape) * item
        dtype = str(memory.dtype).removeprefix("torch.")
        return cls(
            address,
            size,
            layers,
            parts,
            pages,
            page_size,
            token_bytes,
            dtype,
            tuple(inner),
            device,
            owner=memory,
        )

    def require_ram(self) -> None:
        """Raises ConfigError unless copy threads reach it."""
        if self.device != "cpu":
            raise ConfigError(
                f"the pool lies on {self.device}, and copy threads reach only RAM: give a tensor on the CPU, or, for a "
                "GPU's, carrier=strata.CudaCarrier"
            )

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, all layers and parts."""
        return self.layers * self.parts * self.page_size * self.token_bytes

    def fingerprint(self, identity: str) -> bytes:
        """32 bytes that pages on disk must share to be interchangeable: `identity`, dtype and the shape of a page, but
        not the number of pages."""
        digest = hashlib.blake2b(b"strata foreign pool", digest_size=32)
        fields = (identity, self.dtype, str((self.layers, self.parts, self.page_size, self.inner)))
        for field in fields:
            digest.update(len(field.encode()).to_bytes(8, "little") + field.encode())
        return digest.digest()
