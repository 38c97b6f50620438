"""What is moved: pages of Llama-8B and smaller pieces, and the numbers of blocks that are tried."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Direction = Literal["load", "backup"]
DIRECTIONS: tuple[Direction, ...] = ("load", "backup")
LAYERS, PARTS = 32, 2
TOKEN_BYTES = 2048
"""K or V of one token in one layer of Llama-8B: 8 heads of 128 in bfloat16."""
QUOTAS = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Shape:
    """Pages of ``page_tokens`` tokens, each of ``token_bytes`` in one layer and part."""

    token_bytes: int
    page_tokens: int
    layers: int = LAYERS
    parts: int = PARTS

    @property
    def piece_bytes(self) -> int:
        """Contiguous bytes."""
        return self.token_bytes * self.page_tokens

    @property
    def page_bytes(self) -> int:
        """Bytes of a page over all layers and parts."""
        return self.piece_bytes * self.layers * self.parts

    def pages_of(self, size_bytes: int) -> int:
        """Pages that make up about ``size_bytes``; at least one."""
        return max(1, size_bytes // self.page_bytes)


PAGE_1 = Shape(TOKEN_BYTES, 1)
PAGE_16 = Shape(TOKEN_BYTES, 16)


def shapes(quick: bool) -> list[Shape]:
    """Pieces of 512 bytes to 1 MiB, pages of 1 to 512 tokens; those that verdicts are about come first."""
    if quick:
        return [PAGE_16, PAGE_1, Shape(512, 1), Shape(TOKEN_BYTES, 128)]
    others = [Shape(512, 1), Shape(1024, 1), *(Shape(TOKEN_BYTES, 1 << power) for power in range(10))]
    return [PAGE_16, PAGE_1, *(shape for shape in others if shape not in (PAGE_16, PAGE_1))]


def quotas(quick: bool) -> tuple[int, ...]:
    """Blocks of 1,024 threads."""
    return (1, 2, 8) if quick else QUOTAS
