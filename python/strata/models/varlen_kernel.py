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
        for (first, end), (queries, *keys) in zip(
            bounds, _chunks(others, len(others) // len(bounds)), strict=True
        ):
            lengths, cached = rows.queries[first:end], rows.cached[first:end]
            if not len(lengths):
                continue
            stop = start + int(lengths.sum())
            most_query = power_of_two(int(lengths.max()))
            if self._in_place:
                table, used = keys
                # A row may be as long as its block table is wide.
                most_key = table.shape[1] * rows.batch.page_size
                groups.append(_Group(start, stop, most_query, most_key, queries, table, used))
            else:
                token_ends, page_ends, pages = keys
                slots = token_slots(token_ends, page_ends, pages, int(cached.sum()), rows.batch.page_size)
                both = torch.cat([slots, slots + rows.batch.slots])
                most_key = power_of_two(int(cached.max()))
                groups.append(_Group(start, stop, most_query, most_key, queries, token_ends, both))
            start = stop
        most_own = power_of_two(int(rows.own.max())) if len(rows.own) else 0
        return VarlenPlan(self._call, rows, self._in_place, own, most_own, tuple(groups))

    def _keys(self, rows: SplitRows, first: int, end: int) -> tuple[np.ndarray, ...]:
        """Block table and cached tokens; or what `token_slots` takes: a few bytes a page, however long the context."""
        pages, cached = rows.pages[first:end], rows.cached[first:end]
        if self._in_place:
            table = np.zeros((len(pages), power_of_two(max(map(len, pages), default=0))), np.int32)
            for row, ids in enumerate(pages):
                table[row, : len(ids)] = ids
            return table, cached
        counts = np.array([len(ids) for ids in pages], np.int32)
        return ends(cached), ends(counts), np.concatenate(pages) if pages else np.empty(0, np.int32)


@dataclass(frozen=True)
class _Group:
    """Rows that are attended in one call: query tokens ``start:stop``. ``first`` and ``second`` are block table and
    cached tokens, or ends of the gathered keys and the slots of K and then of V."""

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


def token_slots(
    token_ends: torch.Tensor, page_ends: torch.Tensor, pages: torch.Tensor, tokens: int, page_size: int
) -> torch.Tensor:
    """Slots of the first tokens of each row's pages; int64 [tokens], row after row, on the device of the arguments and
    without waiting for it. ``token_ends`` and ``page_ends``: int32 [rows + 1], ends of the rows' tokens and pages;
    ``pages``: their page ids."""
    device = pages.device
    numbers = torch.arange(len(token_ends) - 1, device=device)
    # With the number of tokens told, the device need not be asked for it.
    row = torch.repeat_interleave(numbers, token_ends.diff(), output_size=tokens)
    token = torch.arange(tokens, device=device) - token_ends[row]
    page = pages[page_ends[row] + token // page_size].to(torch.int64)
    return page * page_size + token % page_size


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
