"""How a row that has outgrown its sliding window is cut, so that attention needs next to no masks.

A chunk is cut into blocks shorter than the window. A block's tokens see each other causally, and of what comes before
them most tokens are seen by all of the block: only the oldest ones, as many as the block has tokens, are an edge of
which each token sees one less than the token before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

BLOCK_TOKENS = 256
"""A block of a windowed row has at most as many tokens: the fewer, the smaller the masked edges."""


@dataclass(frozen=True)
class Block:
    """Tokens ``start:stop`` of a row's new tokens, and what they attend to besides each other, in places of the row's
    context: ``seen`` (first, end) all of it, ``edge`` (first, end) in part. Token i of the block sees those of the edge
    from ``lowest + i`` on, at least the last one.

    A block of one token counts itself as part of ``seen``.
    """

    start: int
    stop: int
    seen: tuple[int, int]
    edge: tuple[int, int] = (0, 0)
    lowest: int = 0

    def hidden_edge(self) -> np.ndarray:
        """Which tokens of the edge a token of the block does not see: bool [tokens, edge]."""
        lowest = self.lowest + np.arange(self.stop - self.start)
        return np.arange(*self.edge)[None, :] < lowest[:, None]


def blocks_of(length: int, context: int, window: int | None) -> Iterator[Block]:
    """The blocks of a row of `length` new tokens whose context, these included, is `context` tokens long."""
    cached = context - length
    if window is None or context <= window:
        yield Block(0, length, (0, context if length == 1 else cached))
        return
    most = max(1, min(BLOCK_TOKENS, window - 1))
    for start in range(0, length, most):
        stop = min(start + most, length)
        before = cached + start
        lowest = before + 1 - window
        if stop - start == 1:
            yield Block(start, stop, (max(0, lowest), before + 1))
            continue
        # The first token that the block's last one still sees.
        common = lowest + stop - start - 1
        if common <= 0:
            yield Block(start, stop, (0, before))
        else:
            yield Block(start, stop, (common + 1, before), (max(0, lowest), common + 1), lowest)
