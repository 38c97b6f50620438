"""What attention over paged K/V is to the decoder: planned once a batch, attended once a layer.

Implementations differ in kernels and in how they read pages, never in their result: exact softmax attention of each
new token over its row's context up to itself, or over the newest tokens of that where a window says so. All of them
compute what needs no cached page first, so that a layer's load hides behind it, and call `wait` once, before the first
read of a cached page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class AttentionBatch:
    """Rows of one batch, and the shape of what they attend.

    ``query_lengths``: new tokens of each row; ``context_lengths``: its tokens with these included;
    ``page_tables``: for each row the int64 page ids that cover its context, in host memory.
    ``slots``: token capacity of the pool. ``scale``: what scores are multiplied with. ``window``: each token attends to
    at most as many tokens, itself included, those before it; None: to all of its context.
    """

    query_lengths: Sequence[int]
    context_lengths: Sequence[int]
    page_tables: Sequence[torch.Tensor]
    page_size: int
    slots: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    dtype: torch.dtype
    device: torch.device
    window: int | None = None


class PlannedAttention(Protocol):
    """Attention of one batch; the same for every layer."""

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cached: torch.Tensor,
        wait: Callable[[], None],
    ) -> torch.Tensor:
        """Attention output [N, kv_heads, group, head_dim] of one layer.

        ``query`` is [N, kv_heads, group, head_dim]; ``key`` and ``value`` are the new tokens' [N, kv_heads, head_dim],
        which the caller has already written to ``cached``, this layer's [2, slots, kv_heads, head_dim]. ``wait`` is
        called once, after all that needs no cached page and before the first read of one.
        """
        ...


class PagedAttention(Protocol):
    """A way to attend. ``name`` is what logs and reports call it."""

    name: str

    def plan(self, batch: AttentionBatch) -> PlannedAttention:
        """What every layer of ``batch`` shares: indices, masks, the kernels' own plans."""
        ...
