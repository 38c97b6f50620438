"""Test help: plain, exact stand-ins with the contracts of GPU libraries, for a machine without a GPU."""

from __future__ import annotations

import math
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch

from strata.models.split_attention import Partial
from strata.models.varlen_kernel import Pages


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float
) -> Partial:
    """One row: query [n, heads, head_dim] over key and value [m, kv_heads, head_dim]. Reckoned in float32 at least."""
    assert len(key), "no kernel is asked about a row without keys"
    assert not causal or len(query) == len(key), "kernels differ in how they align what is not square"
    group = query.shape[1] // key.shape[1]
    wide = torch.promote_types(query.dtype, torch.float32)
    keys, values = (part.to(wide).repeat_interleave(group, dim=1) for part in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.to(wide), keys) * scale
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), -math.inf)
    output = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
    return output.to(query.dtype), scores.logsumexp(-1).t()


def varlen(
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
    """`VarlenCall`, row by row; checks what the real kernels take on trust."""
    assert ends_query.dtype == torch.int32 and int(ends_query[-1]) == len(query)
    # Bounds, as few of them as may be: a real kernel may build a plan for each.
    assert int(ends_query.diff().max()) <= most_query < 2 * int(ends_query.diff().max())
    assert most_query & (most_query - 1) == 0
    assert not causal or ends_key is ends_query
    found = []
    for row, (start, stop) in enumerate(zip(ends_query[:-1].tolist(), ends_query[1:].tolist(), strict=True)):
        if pages is None:
            assert ends_key is not None and ends_key.dtype == torch.int32 and int(ends_key[-1]) == len(key)
            assert int(ends_key.diff().max()) <= most_key and most_key & (most_key - 1) == 0
            keys, values = (part[int(ends_key[row]) : int(ends_key[row + 1])] for part in (key, value))
        else:
            assert ends_key is None and pages.table.dtype == pages.used.dtype == torch.int32
            used = int(pages.used[row])
            width = pages.table.shape[1]
            assert int(pages.used.max()) <= most_key == width * key.shape[1] and width & (width - 1) == 0
            keys, values = (part[pages.table[row].long()].flatten(0, 1)[:used] for part in (key, value))
        found.append(attention(query[start:stop], keys, values, causal, scale))
    return torch.cat([output for output, _ in found]), torch.cat([lse for _, lse in found])


class _Wrapper:
    """What both of FlashInfer's wrappers do: a plan of int32 host tensors, then runs with logarithms to base 2."""

    def __init__(self, workspace: torch.Tensor, layout: str) -> None:
        assert workspace.dtype == torch.uint8 and layout == "NHD"
        self._plan: dict[str, Any] = {}

    def plan(self, **arguments: Any) -> None:
        for name, given in arguments.items():
            if isinstance(given, torch.Tensor):
                assert given.dtype == torch.int32 and given.device.type == "cpu", name
        self._plan = arguments

    def _rows(self, query: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]) -> Partial:
        plan = self._plan
        assert query.is_contiguous() and query.shape[1:] == (plan["num_qo_heads"], plan["head_dim_qk"])
        assert query.dtype == plan["q_data_type"]
        bounds = plan["qo_indptr"].tolist()
        found = [
            attention(query[start:stop], key, value, plan["causal"], plan["sm_scale"])
            for start, stop, key, value in zip(bounds, bounds[1:], keys, values, strict=False)
        ]
        logs = torch.cat([lse for _, lse in found]) / math.log(2.0)
        return torch.cat([output for output, _ in found]), logs


class _Ragged(_Wrapper):
    def run(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, return_lse: bool) -> Partial:
        assert return_lse and key.is_contiguous() and value.is_contiguous()
        bounds = self._plan["kv_indptr"].tolist()
        spans = [slice(*bound) for bound in pairwise(bounds)]
        return self._rows(query, [key[span] for span in spans], [value[span] for span in spans])


class _Paged(_Wrapper):
    def run(self, query: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor], return_lse: bool) -> Partial:
        plan = self._plan
        assert return_lse and all(part.shape[1] == plan["page_size"] for part in pages)
        bounds, last = plan["paged_kv_indptr"].tolist(), plan["paged_kv_last_page_len"].tolist()
        contexts: list[list[torch.Tensor]] = [[], []]
        for start, stop, rest in zip(bounds, bounds[1:], last, strict=False):
            assert 1 <= rest <= plan["page_size"]
            ids = plan["paged_kv_indices"][start:stop].long()
            used = (len(ids) - 1) * plan["page_size"] + rest
            for context, part in zip(contexts, pages, strict=True):
                context.append(part[ids].flatten(0, 1)[:used])
        return self._rows(query, *contexts)


flashinfer: Any = SimpleNamespace(
    __version__="of the tests",
    BatchPrefillWithRaggedKVCacheWrapper=_Ragged,
    BatchPrefillWithPagedKVCacheWrapper=_Paged,
)
