"""Paged attention of a GPU in two kernel calls a layer: each chunk's own tokens causally, then all cached context
without a mask; where a token has both, they are merged by their log-sum-exp.

The first call needs nothing that a load brings, so loads hide behind it. A decode row's own token is written before it
is read, so it counts as cached: a batch of decodes is one call. Kernels are given what rows need and nothing else: no
row without keys, causal only where queries and keys are the same tokens (kernels differ in how they align others).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from strata.errors import ModelError
from strata.models.paged_attention import AttentionBatch
from strata.models.staging import to_device

Partial = tuple[torch.Tensor, torch.Tensor]
"""Output [n, heads, head_dim] of n tokens over some of their keys; natural log-sum-exp of the scores [n, heads],
float32 or wider."""


@dataclass(frozen=True)
class SplitRows:
    """A batch cut for the two calls; arrays are int32 in host memory.

    ``own``: lengths of the rows whose tokens attend to each other (chunks of two tokens and more).
    ``queries`` and ``cached``: new and cached tokens of each row that has cached context, the latter at least 1;
    ``pages``: the page ids that cover a row's cached tokens.
    """

    batch: AttentionBatch
    own: np.ndarray
    queries: np.ndarray
    cached: np.ndarray
    pages: tuple[np.ndarray, ...]


class PlannedKernel(Protocol):
    """The two calls of one batch. Tokens of the rows of a call are packed, row after row."""

    def own(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Partial:
        """Causal attention of each row of `SplitRows.own` over itself: query [n, heads, head_dim], key and value
        [n, kv_heads, head_dim]."""
        ...

    def cached(self, query: torch.Tensor, cached: torch.Tensor) -> Partial:
        """Attention of query [n, heads, head_dim] over its row's cached tokens, all of them, in `cached` [2, slots,
        kv_heads, head_dim]."""
        ...


class SplitKernel(Protocol):
    """A family of kernels that can do both calls."""

    name: str

    def plan(self, rows: SplitRows) -> PlannedKernel:
        """Prepares the calls of one batch. Queues copies to the device, waits for none."""
        ...


class SplitAttention:
    """`PagedAttention` by a `SplitKernel`."""

    def __init__(self, kernel: SplitKernel) -> None:
        self.name = kernel.name
        self._kernel = kernel

    def plan(self, batch: AttentionBatch) -> SplitPlan:
        """As `PagedAttention` says, for batches that no window cuts."""
        if batch.window is not None:
            raise ModelError(f"{self.name} knows no sliding window; the plain attention does")
        rows, own_tokens, cached_tokens = split_rows(batch)
        total = sum(batch.query_lengths)
        own, cached = to_device([own_tokens, cached_tokens], batch.device)
        return SplitPlan(
            self._kernel.plan(rows),
            _Selection(own, len(own_tokens) == total),
            _Selection(cached, len(cached_tokens) == total),
        )


def split_rows(batch: AttentionBatch) -> tuple[SplitRows, np.ndarray, np.ndarray]:
    """The rows of both calls, and which of the batch's tokens each call is about (int64, ascending)."""
    queries = np.asarray(batch.query_lengths, np.int32)
    starts = np.cumsum(queries) - queries
    is_chunk = queries > 1
    cached = np.asarray(batch.context_lengths, np.int32) - np.where(is_chunk, queries, 0).astype(np.int32)
    has_cached = cached > 0
    pages = tuple(
        table.numpy(force=True)[: -(-int(count) // batch.page_size)].astype(np.int32)
        for table, count, wanted in zip(batch.page_tables, cached, has_cached, strict=True)
        if wanted
    )
    rows = SplitRows(batch, queries[is_chunk], queries[has_cached], cached[has_cached], pages)
    return rows, _tokens(starts, queries, is_chunk), _tokens(starts, queries, has_cached)


def _tokens(starts: np.ndarray, lengths: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    parts = [
        np.arange(start, start + length)
        for start, length in zip(starts[wanted], lengths[wanted], strict=True)
    ]
    return np.concatenate(parts).astype(np.int64) if parts else np.empty(0, np.int64)


@dataclass(frozen=True)
class _Selection:
    """Tokens of the batch, int64 [n] on the device; ``everyone``: all of them, so that nothing is copied."""

    tokens: torch.Tensor
    everyone: bool

    def __len__(self) -> int:
        return len(self.tokens)

    def of(self, values: torch.Tensor) -> torch.Tensor:
        return values if self.everyone else values.index_select(0, self.tokens)


@dataclass(frozen=True)
class SplitPlan:
    """`PlannedAttention` of one batch."""

    kernel: PlannedKernel
    own: _Selection
    cached: _Selection

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cached: torch.Tensor,
        wait: Callable[[], None],
    ) -> torch.Tensor:
        """As `PlannedAttention` says."""
        queries = query.flatten(1, 2)
        own: Partial | None = None
        if len(self.own):
            own = self.kernel.own(self.own.of(queries), self.own.of(key), self.own.of(value))
        wait()
        if not len(self.cached):
            assert own is not None  # a row without cached context has tokens of its own
            return own[0].view(query.shape)
        found = self.kernel.cached(self.cached.of(queries), cached)
        if own is not None:
            return self._merged(queries, own, found).view(query.shape)
        return found[0].view(query.shape)

    def _merged(self, queries: torch.Tensor, own: Partial, found: Partial) -> torch.Tensor:
        """Both parts in their places; [N, heads, head_dim]."""
        if self.own.everyone and self.cached.everyone:
            return merge(own, found)[0]
        output = torch.zeros_like(queries, memory_format=torch.contiguous_format)
        weight = own[1].new_full(queries.shape[:2], float("-inf"))
        # A token that only one of the calls is about meets a part of no weight.
        output[self.own.tokens], weight[self.own.tokens] = own
        before = output[self.cached.tokens], weight[self.cached.tokens]
        output[self.cached.tokens] = merge(before, found)[0]
        return output


def merge(one: Partial, other: Partial) -> Partial:
    """The attention over the union of two disjoint sets of keys; reckoned in float32 or wider."""
    (output, logsumexp), (other_output, other_logsumexp) = one, other
    weight = torch.sigmoid(other_logsumexp - logsumexp).unsqueeze(-1)
    merged = torch.lerp(output.to(weight.dtype), other_output.to(weight.dtype), weight)
    return merged.to(output.dtype), torch.logaddexp(logsumexp, other_logsumexp)
