"""torch's variable-length flash attention (torch.nn.attention.varlen, torch 2.10 and newer) over paged K/V.

Where the installed kernels take page tables (FlashAttention 3, new cuDNN) they read the pool in place. Everywhere else
the scattered pages are gathered token by token first, which costs one more pass over the context; the memory that this
takes is bounded, since rows are attended in groups.

Lengths and widths that a kernel is told are bounds, rounded up to powers of two: some (cuDNN) build a plan for every
new one, which a context that grows with each decode step must not pay for each time.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from strata.errors import ModelError
from strata.models.split_attention import Partial, SplitRows
from strata.models.staging import to_device

GATHERED_TOKENS = 1 << 16
"""Context tokens whose K and V are gathered at a time; one longer row alone may pass it."""


@dataclass(frozen=True)
class Pages:
    """Where keys lie if they are not packed: int32 block table [rows, most pages], cached tokens [rows]."""

    table: torch.Tensor
    used: torch.Tensor


class VarlenCall(Protocol):
    """Attention of packed rows of different lengths, with its natural log-sum-exp.

    query [n, heads, head_dim]; key and value [m, kv_heads, head_dim], or with ``pages`` the pool [pages, page_size,
    kv_heads, head_dim]; ``ends_*`` int32 [rows + 1], from 0 on, equal objects for causal; ``most_*``: no row is longer.
    """

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        ends_query: torch.Tensor,
        ends_key: torch.Tensor | None,
        most_query: int,
        most_key: int,
        causal: bool,
        scale: float,
        pages: Pages | None,
    ) -> Partial: ...


class TorchVarlen:
    """`VarlenCall` by the installed torch, whichever of its signatures that has."""

    def __init__(self) -> None:
        try:
            module: Any = importlib.import_module("torch.nn.attention.varlen")
        except ImportError as error:
            raise ModelError(
                f"torch {torch.__version__} has no varlen attention; it came with 2.10"
            ) from error
        self._call = module.varlen_attn
        self._lse = module.AuxRequest(lse=True)
        self._known = frozenset(inspect.signature(module.varlen_attn).parameters)
        self.takes_pages = {"block_table", "seqused_k"} <= self._known

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        ends_query: torch.Tensor,
        ends_key: torch.Tensor | None,
        most_query: int,
        most_key: int,
        causal: bool,
        scale: float,
        pages: Pages | None,
    ) -> Partial:
        """As `VarlenCall` says."""
        wanted: dict[str, object] = {
            "return_aux": self._lse,
            # One of these two says causal; the older one came first.
            "is_causal": causal,
            "window_size": (-1, 0) if causal else (-1, -1),
            # Without it, kernels take 1 / sqrt(head_dim), which is what every model here wants.
            "scale": scale,
            "enable_gqa": query.shape[1] != key.shape[-2],
        }
        if pages is not None:
            wanted |= {"block_table": pages.table, "seqused_k": pages.used}
        known = {name: given for name, given in wanted.items() if name in self._known}
        output, logsumexp = self._call(query, key, value, ends_query, ends_key, most_query, most_key, **known)
        return output, logsumexp.t()


class VarlenKernel:
    """`SplitKernel` over a `VarlenCall`; ``in_place``: by page tables instead of gathering."""

    def __init__(self, call: VarlenCall, in_place: bool) -> None:
        self.name = "torch varlen, pages in place" if in_place else "torch varlen, pages gathered"
        self._call = call
        self._in_place = in_place

    def plan(self, rows: SplitRows) -> VarlenPlan:
        """As `SplitKernel` says."""
        bounds = [(0, len(rows.pages))] if self._in_place else list(_groups(rows.cached))
        arrays = [ends(rows.own)]
        for first, end in bounds:
            arrays += [ends(rows.queries[first:end]), *self._keys(rows, first, end)]
        own, *others = to_device(arrays, rows.batch.device)
        groups, start = [], 0
        for (first, end), (queries, *keys) in zip(bounds, _chunks(others, 3), strict=True):
            lengths = rows.queries[first:end]
            if not len(lengths):
                continue
            stop = start + int(lengths.sum())
            # In place, a row may be as long as its block table is wide.
            most_key = (
                keys[0].shape[1] * rows.batch.page_size
                if self._in_place
                else power_of_two(int(rows.cached[first:end].max()))
            )
            most_query = power_of_two(int(lengths.max()))
            groups.append(_Group(start, stop, most_query, most_key, queries, keys[0], keys[1]))
            start = stop
        most_own = power_of_two(int(rows.own.max())) if len(rows.own) else 0
        return VarlenPlan(self._call, rows, self._in_place, own, most_own, tuple(groups))

    def _keys(self, rows: SplitRows, first: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Block table and cached tokens; or ends of the gathered keys, and the slots of K and then of V."""
        pages, cached = rows.pages[first:end], rows.cached[first:end]
        if self._in_place:
            table = np.zeros((len(pages), power_of_two(max(map(len, pages), default=0))), np.int32)
            for row, ids in enumerate(pages):
                table[row, : len(ids)] = ids
            return table, cached
        slots = [token_slots(ids, rows.batch.page_size, int(n)) for ids, n in zip(pages, cached, strict=True)]
        keys = np.concatenate(slots) if slots else np.empty(0, np.int64)
        return ends(cached), np.concatenate([keys, keys + rows.batch.slots])


@dataclass(frozen=True)
class _Group:
    """Rows that are attended in one call: query tokens ``start:stop``. ``first`` and ``second`` are as `_keys` says."""

    start: int
    stop: int
    most_query: int
    most_key: int
    ends_query: torch.Tensor
    first: torch.Tensor
    second: torch.Tensor


@dataclass(frozen=True)
class VarlenPlan:
    """`PlannedKernel` of one batch."""

    call: VarlenCall
    rows: SplitRows
    in_place: bool
    ends_own: torch.Tensor
    most_own: int
    groups: tuple[_Group, ...]

    def own(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Partial:
        """As `PlannedKernel` says."""
        both, most = self.ends_own, self.most_own
        return self.call(query, key, value, both, both, most, most, True, self.rows.batch.scale, None)

    def cached(self, query: torch.Tensor, cached: torch.Tensor) -> Partial:
        """As `PlannedKernel` says."""
        parts = [self._group(query[group.start : group.stop], cached, group) for group in self.groups]
        if len(parts) == 1:
            return parts[0]
        return torch.cat([output for output, _ in parts]), torch.cat([lse for _, lse in parts])

    def _group(self, query: torch.Tensor, cached: torch.Tensor, group: _Group) -> Partial:
        scale, most = self.rows.batch.scale, (group.most_query, group.most_key)
        if self.in_place:
            key, value = cached.unflatten(1, (-1, self.rows.batch.page_size)).unbind(0)
            pages = Pages(group.first, group.second)
            return self.call(query, key, value, group.ends_query, None, *most, False, scale, pages)
        flat = cached.view(-1, *cached.shape[2:])
        key, value = flat.index_select(0, group.second).chunk(2)
        return self.call(query, key, value, group.ends_query, group.first, *most, False, scale, None)


def ends(lengths: np.ndarray) -> np.ndarray:
    """Where packed rows begin and end: int32 [rows + 1]."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def power_of_two(count: int) -> int:
    """The smallest power of two that is at least `count`."""
    return 1 << max(0, count - 1).bit_length()


def token_slots(pages: np.ndarray, page_size: int, tokens: int) -> np.ndarray:
    """Slots of the first `tokens` tokens of some pages; int64."""
    slots = pages[:, None].astype(np.int64) * page_size + np.arange(page_size)
    return slots.reshape(-1)[:tokens]


def _groups(cached: np.ndarray) -> Iterator[tuple[int, int]]:
    """Rows as (first, end), so that each group's context stays within `GATHERED_TOKENS`."""
    first, tokens = 0, 0
    for row, count in enumerate(cached.tolist()):
        if row > first and tokens + count > GATHERED_TOKENS:
            yield first, row
            first, tokens = row, 0
        tokens += count
    yield first, len(cached)


def _chunks(items: list[torch.Tensor], size: int) -> list[list[torch.Tensor]]:
    return [items[place : place + size] for place in range(0, len(items), size)]
