"""torch's flex attention over paged K/V: the pool is read in place, and a mask says which of its slots a row may see.

Blocks of the pool that hold no page of a row are left out; where pages are smaller than a block and scattered, the
rest of their blocks is masked, which costs up to the ratio of the two. A masked value still meets a weight of 0, so
every slot of the pool has to hold finite numbers, written or not. Compiled on a GPU; eager, and for tests only, on a
CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.attention.flex_attention as flex
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from strata.models.split_attention import Partial, SplitRows
from strata.models.staging import to_device

BLOCK = 128
"""Tokens in a block of flex attention's masks, of queries and of keys."""

# torch 2.10 renamed how the log-sum-exp is asked for.
_WITH_LSE: dict[str, Any] = (
    {"return_aux": flex.AuxRequest(lse=True)} if hasattr(flex, "AuxRequest") else {"return_lse": True}
)

MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class FlexKernel:
    """`SplitKernel` by flex attention on one device."""

    name = "torch flex"

    def __init__(self, device: torch.device) -> None:
        self._attend: Any = flex_attention
        if device.type != "cpu":
            self._attend = torch.compile(flex_attention, dynamic=True)

    def plan(self, rows: SplitRows) -> FlexPlan:
        """As `SplitKernel` says."""
        own = _own_mask(rows) if len(rows.own) else None
        # Decodes are one call with a row each; of chunks there are few, and each is a call.
        decodes = np.flatnonzero(rows.queries == 1)
        chunks = [np.array([row]) for row in np.flatnonzero(rows.queries > 1)]
        calls = [_plan_call(rows, chosen) for chosen in ([decodes] if len(decodes) else []) + chunks]
        return FlexPlan(self._attend, rows, own, tuple(calls))


@dataclass(frozen=True)
class _Call:
    """Rows of equally many queries: ``tokens`` int64 [rows * length] of the packed queries."""

    tokens: torch.Tensor
    rows: int
    mask: BlockMask


@dataclass(frozen=True)
class FlexPlan:
    """`PlannedKernel` of one batch."""

    run: Callable[..., tuple[torch.Tensor, Any]]
    rows: SplitRows
    own_mask: BlockMask | None
    calls: tuple[_Call, ...]

    def own(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Partial:
        """As `PlannedKernel` says."""
        return self._attend(query, 1, key, value, self.own_mask)

    def cached(self, query: torch.Tensor, cached: torch.Tensor) -> Partial:
        """As `PlannedKernel` says."""
        key, value = cached.unbind(0)
        if len(self.calls) == 1:
            return self._attend(query, self.calls[0].rows, key, value, self.calls[0].mask)
        output, logsumexp = torch.empty_like(query), None
        for call in self.calls:
            found, weight = self._attend(query[call.tokens], call.rows, key, value, call.mask)
            if logsumexp is None:
                logsumexp = weight.new_empty(query.shape[:2])
            output[call.tokens], logsumexp[call.tokens] = found, weight
        assert logsumexp is not None  # the call is made only where a row has cached tokens
        return output, logsumexp

    def _attend(
        self, query: torch.Tensor, rows: int, key: torch.Tensor, value: torch.Tensor, mask: BlockMask | None
    ) -> Partial:
        """query [rows * length, heads, head_dim] over key and value [m, kv_heads, head_dim], which all rows share."""
        queries = query.unflatten(0, (rows, -1)).transpose(1, 2)
        keys, values = key.transpose(0, 1).unsqueeze(0), value.transpose(0, 1).unsqueeze(0)
        grouped = query.shape[1] != key.shape[1]
        output, found = self.run(
            queries,
            keys,
            values,
            block_mask=mask,
            scale=self.rows.batch.scale,
            enable_gqa=grouped,
            **_WITH_LSE,
        )
        logsumexp: torch.Tensor = found if isinstance(found, torch.Tensor) else found.lse
        return output.transpose(1, 2).flatten(0, 1), logsumexp.transpose(1, 2).flatten(0, 1)


def _own_mask(rows: SplitRows) -> BlockMask:
    """Each packed token sees its own row up to itself."""
    row_of = np.repeat(np.arange(len(rows.own), dtype=np.int32), rows.own)
    first_of = np.repeat(np.cumsum(rows.own) - rows.own, rows.own)
    tokens = len(row_of)
    lowest = first_of[::BLOCK] // BLOCK
    blocks = [np.arange(low, block + 1) for block, low in enumerate(lowest)]
    row = to_device([row_of], rows.batch.device)[0]

    def visible(b: torch.Tensor, h: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (row[query] == row[key]) & (query >= key)

    return _block_mask([blocks], (tokens, tokens), visible, rows.batch.device)


def _plan_call(rows: SplitRows, chosen: np.ndarray) -> _Call:
    batch = rows.batch
    starts = np.cumsum(rows.queries) - rows.queries
    length = int(rows.queries[chosen[0]])
    tokens = (starts[chosen][:, None] + np.arange(length)).reshape(-1).astype(np.int64)
    pages = [rows.pages[row] for row in chosen]
    places = np.stack(
        [
            np.repeat(np.arange(len(pages)), [len(ids) for ids in pages]),
            np.concatenate(pages).astype(np.int64),
            np.concatenate([np.arange(len(ids)) for ids in pages]),
        ]
    )
    tokens_on, places_on, cached = to_device([tokens, places, rows.cached[chosen]], batch.device)
    # The page table, inverted: which page of the row a page of the pool is, or -1.
    logical = torch.full(
        (len(chosen), -(-batch.slots // batch.page_size)), -1, dtype=torch.int32, device=batch.device
    )
    logical[places_on[0], places_on[1]] = places_on[2].to(torch.int32)
    page_size = batch.page_size

    def visible(b: torch.Tensor, h: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        page = logical[b, key // page_size]
        return (page >= 0) & (page * page_size + key % page_size < cached[b])

    blocks = [[_pool_blocks(ids, page_size)] * -(-length // BLOCK) for ids in pages]
    return _Call(tokens_on, len(chosen), _block_mask(blocks, (length, batch.slots), visible, batch.device))


def _pool_blocks(pages: np.ndarray, page_size: int) -> np.ndarray:
    """Blocks of the pool that hold a token of some pages, ascending."""
    first = pages.astype(np.int64) * page_size // BLOCK
    last = ((pages.astype(np.int64) + 1) * page_size - 1) // BLOCK
    most = int((last - first).max()) + 1
    return np.unique(np.minimum(first[:, None] + np.arange(most), last[:, None]))


def _block_mask(
    blocks: list[list[np.ndarray]], lengths: tuple[int, int], visible: MaskMod, device: torch.device
) -> BlockMask:
    """A mask from the key blocks of each row's query blocks; ``lengths`` are tokens of queries and of keys."""
    columns = -(-lengths[1] // BLOCK)
    counts = np.array([[[len(found) for found in row]] for row in blocks], np.int32)
    indices = np.zeros((*counts.shape, columns), np.int32)
    for row, found_of in enumerate(blocks):
        for block, found in enumerate(found_of):
            kept = found[found < columns]
            counts[row, 0, block] = len(kept)
            indices[row, 0, block, : len(kept)] = kept
    counts_on, indices_on = to_device([counts, indices], device)
    return BlockMask.from_kv_blocks(
        counts_on, indices_on, BLOCK_SIZE=BLOCK, mask_mod=visible, seq_lengths=lengths
    )
