"""What every device pool is to the engine: one tensor, layer-first, at a fixed address."""

from __future__ import annotations

from typing import Protocol

import torch


class DevicePool(Protocol):
    """The device tier's memory, `[layer][part][page][token][head][dim]`."""

    @property
    def tensor(self) -> torch.Tensor:
        """The pool in its shape and dtype."""
        ...

    @property
    def address(self) -> int:
        """The address of its first byte."""
        ...

    @property
    def size_bytes(self) -> int:
        """Its bytes."""
        ...
