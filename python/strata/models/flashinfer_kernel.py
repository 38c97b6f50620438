"""FlashInfer's paged kernels, where it is installed: each layer's part of the pool is read in place, since K and V of a
layer are what FlashInfer calls NHD pages.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from strata.errors import ModelError
from strata.models.split_attention import Partial, SplitRows
from strata.models.varlen_kernel import ends

WORKSPACE_BYTES = 256 << 20
"""What each wrapper keeps its partial results in."""


class FlashInferKernel:
    """`SplitKernel` by FlashInfer's wrappers on one device. ``library`` stands for the module in tests."""

    def __init__(self, device: torch.device, library: Any = None) -> None:
        if library is None:
            try:
                library = importlib.import_module("flashinfer")
            except ImportError as error:
                raise ModelError("FlashInfer is not installed (pip install flashinfer-python)") from error
        self.name = f"FlashInfer {getattr(library, '__version__', '')}".strip()
        self._device = device
        self._staged: torch.cuda.Event | None = None
        own, cached = (torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
        self._own = library.BatchPrefillWithRaggedKVCacheWrapper(own, "NHD")
        self._cached = library.BatchPrefillWithPagedKVCacheWrapper(cached, "NHD")

    def plan(self, rows: SplitRows) -> FlashInferPlan:
        """As `SplitKernel` says, but waits until the device has come to the batch before. The wrappers hold one plan at
        a time: that of the batch planned last."""
        # A wrapper stages every plan in the same pinned memory, and what is there may not have been copied yet.
        if self._staged is not None:
            self._staged.synchronize()
        batch = rows.batch
        shape = {"num_qo_heads": batch.heads, "num_kv_heads": batch.kv_heads, "head_dim_qk": batch.head_dim}
        # Plans are made from host memory; given tensors of the device, FlashInfer would wait to read them.
        common = {**shape, "sm_scale": batch.scale, "q_data_type": batch.dtype, "kv_data_type": batch.dtype}
        if len(rows.own):
            lengths = torch.from_numpy(ends(rows.own))
            self._own.plan(qo_indptr=lengths, kv_indptr=lengths, causal=True, **common)
        if len(rows.cached):
            counts = np.array([len(pages) for pages in rows.pages], np.int32)
            last = rows.cached - (counts - 1) * batch.page_size
            self._cached.plan(
                qo_indptr=torch.from_numpy(ends(rows.queries)),
                paged_kv_indptr=torch.from_numpy(ends(counts)),
                paged_kv_indices=torch.from_numpy(np.concatenate(rows.pages)),
                paged_kv_last_page_len=torch.from_numpy(last.astype(np.int32)),
                page_size=batch.page_size,
                causal=False,
                **common,
            )
        if self._device.type == "cuda":
            self._staged = torch.cuda.Event()
            self._staged.record()
        return FlashInferPlan(self._own, self._cached, batch.page_size)


@dataclass(frozen=True)
class FlashInferPlan:
    """`PlannedKernel` of the batch that was planned last."""

    own_wrapper: Any
    cached_wrapper: Any
    page_size: int

    def own(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Partial:
        """As `PlannedKernel` says."""
        packed = (part.contiguous() for part in (query, key, value))
        output, logsumexp = self.own_wrapper.run(*packed, return_lse=True)
        return output, natural(logsumexp)

    def cached(self, query: torch.Tensor, cached: torch.Tensor) -> Partial:
        """As `PlannedKernel` says."""
        pages = cached.unflatten(1, (-1, self.page_size)).unbind(0)
        output, logsumexp = self.cached_wrapper.run(query.contiguous(), pages, return_lse=True)
        return output, natural(logsumexp)


def natural(logsumexp: torch.Tensor) -> torch.Tensor:
    """FlashInfer gives logarithms to base 2."""
    return logsumexp * math.log(2.0)
