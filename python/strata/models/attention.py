"""Attention of rows of mixed lengths over paged K/V: exact softmax, no context copied that can be viewed
instead.

A row's context is split where that saves work: the chunk's own tokens attend causally to each other before
any cached page is needed (so a load hides behind them), then to the cached context without a mask; the two
parts are merged by their log-sum-exp. Since cached keys carry their position already (rope is applied before
they are stored), the order of cached tokens does not matter: long runs of consecutive pages are read in
place, only the scattered rest is gathered. Decode rows with short contexts are gathered into one padded call,
because there a call costs more than the copy. A row that has outgrown a sliding window is attended in blocks
(`windows`), each of which reads what it sees of the pool, earlier tokens of its own chunk included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from strata.models.paged_attention import AttentionBatch
from strata.models.windows import Block, blocks_of

# A run shorter than this is cheaper to gather than to give a call of its own; so is a whole decode row.
MINIMUM_RUN_TOKENS = 1024

_flash_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(frozen=True)
class Edge:
    """Context of which each token sees another part: ``slots`` as `RowPlan.scattered`, ``mask`` [1, 1, M, n]."""

    slots: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True)
class RowPlan:
    """A row, or a block of one, that is attended on its own: tokens ``start:stop`` of the batch, and their context.

    ``runs`` are (first slot, end slot) pairs read in place, ``scattered`` the remaining slots as indices into
    the flattened K and V of one layer ([2 * n], K's first). ``edge`` is what a sliding window shows in part.
    """

    start: int
    stop: int
    runs: tuple[tuple[int, int], ...]
    scattered: torch.Tensor | None
    edge: Edge | None


@dataclass(frozen=True)
class DecodePlan:
    """Decode rows that are attended in one padded call.

    ``rows`` are batch indices [R], ``slots`` [2 * R * longest] as in `RowPlan`, ``mask`` [R, 1, 1, longest].
    """

    rows: torch.Tensor
    slots: torch.Tensor
    mask: torch.Tensor | None
    longest: int


@dataclass(frozen=True)
class AttentionPlan:
    """How one batch is attended; the same for every layer."""

    rows: tuple[RowPlan, ...]
    decodes: DecodePlan | None
    scale: float

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cached: torch.Tensor,
        wait: Callable[[], None],
    ) -> torch.Tensor:
        """As `PlannedAttention` says."""
        return attend(query, key, value, cached, self, self.scale, wait)


class PlainAttention:
    """`PagedAttention` out of torch's own operators: torch's flash attention on a CPU, matrix products elsewhere."""

    name = "plain"

    def plan(self, batch: AttentionBatch) -> AttentionPlan:
        """As `PagedAttention` says."""
        rows, decodes = plan_attention(batch)
        return AttentionPlan(rows, decodes, batch.scale)


def plan_attention(batch: AttentionBatch) -> tuple[tuple[RowPlan, ...], DecodePlan | None]:
    """Choose for each row how its context is read."""
    rows: list[RowPlan] = []
    decode_rows: list[int] = []
    decode_slots: list[np.ndarray] = []
    start = 0
    for length, context, table in zip(
        batch.query_lengths, batch.context_lengths, batch.page_tables, strict=True
    ):
        pages = table.numpy(force=True)
        for block in blocks_of(length, context, batch.window):
            # A single token is written before it is read, so it counts as cached.
            if block.stop - block.start == 1 and block.seen[1] - block.seen[0] < MINIMUM_RUN_TOKENS:
                decode_rows.append(start + block.start)
                decode_slots.append(_token_slots(pages, batch.page_size, *block.seen))
            else:
                rows.append(_plan_row(batch, start, pages, block))
        start += length
    decodes = _plan_decodes(batch, decode_rows, decode_slots) if decode_rows else None
    return tuple(rows), decodes


def _plan_row(batch: AttentionBatch, start: int, pages: np.ndarray, block: Block) -> RowPlan:
    """A block of the row whose tokens begin at `start` of the batch."""
    runs, scattered = _split_runs(pages, batch.page_size, *block.seen)
    indices = _both_parts(scattered, batch.slots, batch.device) if len(scattered) else None
    edge = None
    if block.edge[0] < block.edge[1]:
        slots = _token_slots(pages, batch.page_size, *block.edge)
        edge = Edge(
            _both_parts(slots, batch.slots, batch.device),
            _mask(block.hidden_edge(), batch.dtype, batch.device)[None, None],
        )
    return RowPlan(start + block.start, start + block.stop, runs, indices, edge)


def _token_slots(pages: np.ndarray, page_size: int, first: int, end: int) -> np.ndarray:
    """Slots of context tokens ``first:end``."""
    offset = first // page_size
    slots = pages[offset : -(-end // page_size), None].astype(np.int64) * page_size + np.arange(page_size)
    return slots.reshape(-1)[first - offset * page_size : end - offset * page_size]


def _split_runs(
    pages: np.ndarray, page_size: int, first: int, end: int
) -> tuple[tuple[tuple[int, int], ...], np.ndarray]:
    """Context tokens ``first:end`` as long runs of slots, and the slots outside any long run."""
    if first >= end:
        return (), np.empty(0, np.int64)
    # Page by page, in the order of the pool; the first and the last page may be there in part.
    chosen = pages[first // page_size : -(-end // page_size)].astype(np.int64)
    firsts, ends = chosen * page_size, (chosen + 1) * page_size
    firsts[0] += first % page_size
    ends[-1] -= -end % page_size
    order = np.argsort(chosen)
    firsts, ends = firsts[order], ends[order]
    breaks = np.flatnonzero(firsts[1:] != ends[:-1]) + 1
    starts, stops = firsts[np.r_[0, breaks]], ends[np.r_[breaks - 1, len(ends) - 1]]
    long = (stops - starts >= MINIMUM_RUN_TOKENS) | (len(starts) == 1)
    runs = tuple((int(start), int(stop)) for start, stop in zip(starts[long], stops[long], strict=True))
    rest = [np.arange(start, stop) for start, stop in zip(starts[~long], stops[~long], strict=True)]
    return runs, np.concatenate(rest) if rest else np.empty(0, np.int64)


def _both_parts(slots: np.ndarray, capacity: int, device: torch.device) -> torch.Tensor:
    """Slots of K followed by those of V, as rows of one layer's flattened K and V."""
    return torch.from_numpy(np.concatenate([slots, slots + capacity])).to(device)


def _mask(hidden: np.ndarray, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What is added to scores: minus infinity where a key is hidden."""
    blocked = torch.from_numpy(hidden)
    return torch.zeros(blocked.shape, dtype=dtype).masked_fill_(blocked, float("-inf")).to(device)


def _plan_decodes(batch: AttentionBatch, rows: list[int], row_slots: list[np.ndarray]) -> DecodePlan:
    lengths = np.array([len(slots) for slots in row_slots])
    longest = int(lengths.max())
    padded = np.empty((len(rows), longest), np.int64)
    for index, slots in enumerate(row_slots):
        padded[index, : len(slots)] = slots
        # Padding repeats a written slot: a masked weight of 0 times an unwritten NaN would still be NaN.
        padded[index, len(slots) :] = slots[0]
    mask = None
    if int(lengths.min()) < longest:
        hidden = np.arange(longest)[None, :] >= lengths[:, None]
        mask = _mask(hidden, batch.dtype, batch.device)[:, None, None, :]
    indices = torch.tensor(rows, device=batch.device)
    return DecodePlan(indices, _both_parts(padded.reshape(-1), batch.slots, batch.device), mask, longest)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cached: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    wait: Callable[[], None],
) -> torch.Tensor:
    """One layer of a plan; as `PlannedAttention` says."""
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    own = [_attend_own(query, key, value, row, scale) for row in plan.rows]
    wait()
    for row, partial in zip(plan.rows, own, strict=True):
        merged = _attend_cached(query[row.start : row.stop], cached, row, partial, scale)
        output[row.start : row.stop].permute(1, 2, 0, 3).copy_(merged)
    if plan.decodes is not None:
        _attend_decodes(query, cached, plan.decodes, scale, output)
    return output


# A partial result: output [kv_heads, group, M, head_dim], log-sum-exp of its scores [kv_heads, group, M].
Partial = tuple[torch.Tensor, torch.Tensor]


def _attend_own(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, row: RowPlan, scale: float
) -> Partial | None:
    """A chunk's tokens over each other; None for a decode row, whose own token is read with its cache."""
    if row.stop - row.start == 1:
        return None
    queries = query[row.start : row.stop].permute(1, 2, 0, 3)
    keys, values = (part[row.start : row.stop].transpose(0, 1).unsqueeze(1) for part in (key, value))
    group = queries.shape[1]
    return _flash(queries, keys.expand(-1, group, -1, -1), values.expand(-1, group, -1, -1), True, scale)


def _attend_cached(
    query: torch.Tensor, cached: torch.Tensor, row: RowPlan, partial: Partial | None, scale: float
) -> torch.Tensor:
    """``partial`` merged with ``query`` [M, kv_heads, group, head_dim] over the row's cached context."""
    if row.edge is not None:
        found = _attend_edge(query, cached, row.edge, scale)
        partial = found if partial is None else _merge(partial, found)
    parts = [cached[:, first:end] for first, end in row.runs]
    if row.scattered is not None:
        parts.append(_gather(cached, row.scattered))
    length, kv_heads, group, head_dim = query.shape
    # Without a mask, the query heads that share a KV head are simply more queries: no key is repeated.
    folded = query.permute(1, 2, 0, 3).reshape(kv_heads, 1, group * length, head_dim) if parts else query
    for part in parts:
        keys, values = part.transpose(1, 2).unsqueeze(2).unbind(0)
        output, logsumexp = _flash(folded, keys, values, False, scale)
        found = output.view(kv_heads, group, length, head_dim), logsumexp.reshape(kv_heads, group, length)
        partial = found if partial is None else _merge(partial, found)
    assert partial is not None  # a row without cached context has tokens of its own
    return partial[0]


def _attend_edge(query: torch.Tensor, cached: torch.Tensor, edge: Edge, scale: float) -> Partial:
    """``query`` [M, kv_heads, group, head_dim] over what its window shows in part."""
    queries = query.permute(1, 2, 0, 3)
    keys, values = _gather(cached, edge.slots).transpose(1, 2).unsqueeze(2).unbind(0)
    group = queries.shape[1]
    return _flash(
        queries, keys.expand(-1, group, -1, -1), values.expand(-1, group, -1, -1), False, scale, edge.mask
    )


def _attend_decodes(
    query: torch.Tensor, cached: torch.Tensor, plan: DecodePlan, scale: float, output: torch.Tensor
) -> None:
    """All short decode rows at once; their outputs are written to their places in ``output``."""
    count = len(plan.rows)
    context = _gather(cached, plan.slots).view(2, count, plan.longest, *cached.shape[2:])
    keys, values = context.transpose(2, 3).unbind(0)
    everyone = count == len(query)
    queries = query if everyone else query.index_select(0, plan.rows)
    # [R, kv_heads, group, head_dim] reads as R batches of kv_heads heads with `group` queries each.
    found, _ = _flash(queries, keys, values, False, scale, plan.mask)
    if everyone:
        output.copy_(found)
    else:
        output.index_copy_(0, plan.rows, found)


def _gather(cached: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Rows of K and V [2, n, kv_heads, head_dim] in one copy."""
    flat = cached.view(-1, cached.shape[2] * cached.shape[3])
    return flat.index_select(0, slots).view(2, -1, cached.shape[2], cached.shape[3])


def _merge(one: Partial, other: Partial) -> Partial:
    """The attention over the union of two disjoint sets of keys."""
    (output, logsumexp), (other_output, other_logsumexp) = one, other
    weight = torch.sigmoid(other_logsumexp - logsumexp).to(output.dtype).unsqueeze(-1)
    return torch.lerp(output, other_output, weight), torch.logaddexp(logsumexp, other_logsumexp)


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: bool,
    scale: float,
    mask: torch.Tensor | None = None,
) -> Partial:
    """Attention with its log-sum-exp: query [B, H, M, D], key and value [B, H, L, D], any strides but D's."""
    if query.device.type == "cpu":
        output, logsumexp = _flash_on_cpu(query, key, value, 0.0, causal, attn_mask=mask, scale=scale)
        return output, logsumexp
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = torch.matmul(query, key.transpose(-1, -2)).to(wide) * scale
    if mask is not None:
        scores = scores + mask
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    logsumexp = torch.logsumexp(scores, -1)
    return torch.matmul((scores - logsumexp.unsqueeze(-1)).exp().to(value.dtype), value), logsumexp
