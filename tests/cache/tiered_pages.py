"""A pool of numbers in which a page's bytes follow from the tokens up to its end, so that any wrong byte shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

LAYERS, PARTS, PAGE_SIZE, WIDTH = 3, 2, 2, 4


def empty_pool(pages: int) -> npt.NDArray[np.float64]:
    return np.zeros((LAYERS, PARTS, pages, PAGE_SIZE, WIDTH))


def page_bytes() -> int:
    return LAYERS * PARTS * PAGE_SIZE * WIDTH * 8


def expected(tokens: Sequence[int], salt: str, layer: int) -> npt.NDArray[np.float64]:
    """[tokens, parts, width] of one layer: a hash of all tokens up to each, the layer, the part and the salt."""
    state, rows = hash(salt) & 0xFFFF, []
    for token in tokens:
        state = (state * 1000003 + token + 1) % (1 << 40)
        rows.append(state)
    base = np.asarray(rows, dtype=np.float64).reshape(-1, 1, 1)
    return base + 0.25 * np.arange(PARTS).reshape(1, -1, 1) + 0.001 * np.arange(WIDTH) + layer * 7.0


def write(pool: npt.NDArray[Any], tokens: Sequence[int], salt: str, first: int, pages: Sequence[int]) -> None:
    """Writes the pages of `tokens` from page `first` on, as a model would compute them."""
    for layer in range(LAYERS):
        values = expected(tokens, salt, layer)
        for index, page in enumerate(pages):
            start = (first + index) * PAGE_SIZE
            pool[layer, :, page] = values[start : start + PAGE_SIZE].transpose(1, 0, 2)


def read(pool: npt.NDArray[Any], pages: Sequence[int], layer: int) -> npt.NDArray[np.float64]:
    """[tokens, parts, width] of one layer as these pages hold it."""
    return pool[layer][:, list(pages)].transpose(1, 2, 0, 3).reshape(-1, PARTS, WIDTH)
