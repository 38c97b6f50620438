"""Which attention a device gets: the first in an order of preference that proves itself there.

What is installed differs from machine to machine and version to version, so nothing is taken on trust: each candidate
attends small batches of chunks and decodes over scattered pages and has to agree with plain arithmetic. The log says
which one serves and why those before it do not. Only a kernel that takes the device's context down with it is beyond
this.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from strata.errors import ModelError
from strata.models.attention import PlainAttention
from strata.models.config import ModelConfig
from strata.models.flashinfer_kernel import FlashInferKernel
from strata.models.flex_kernel import FlexKernel
from strata.models.paged_attention import AttentionBatch, PagedAttention, PlannedAttention
from strata.models.split_attention import SplitAttention
from strata.models.varlen_kernel import TorchVarlen, VarlenKernel

_log = logging.getLogger("strata.models")

TOLERANCE = 0.02
"""Largest error of a candidate, as a share of the largest value: a few roundings of bfloat16, whose step is 1/256."""

_TRIALS = (((150, 1, 1, 40), (200, 33, 1, 40)), ((1, 1, 1), (200, 33, 1)))
"""New tokens and contexts of two batches: a chunk behind cached tokens, two decodes and a chunk from nothing, partial
pages among them; and decodes alone, for which kernels have ways of their own."""

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Query, key, value and one layer's pool, as `PlannedAttention.attend` takes them."""
Candidate = Callable[[torch.device], PagedAttention]


def candidates() -> list[tuple[str, Candidate]]:
    """From the fastest down; the last one needs nothing but torch."""
    return [
        ("FlashInfer", lambda device: SplitAttention(FlashInferKernel(device))),
        ("torch varlen, pages in place", lambda device: SplitAttention(_in_place())),
        ("torch varlen, pages gathered", lambda device: SplitAttention(VarlenKernel(TorchVarlen(), False))),
        ("torch flex", lambda device: SplitAttention(FlexKernel(device))),
    ]


def _in_place() -> VarlenKernel:
    call = TorchVarlen()
    if not call.takes_pages:
        raise ModelError(f"varlen attention of torch {torch.__version__} takes no page tables")
    return VarlenKernel(call, in_place=True)


def default_attention(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> PagedAttention:
    """The attention for a model on a device: plain on a CPU and for float32 and float64, else what proves itself."""
    if device.type == "cuda" and dtype.itemsize < 4:
        return ProvenAttention(config, dtype, device)
    return PlainAttention()


class ProvenAttention:
    """`PagedAttention` that chooses when it first sees a page size, since not every kernel takes every size. ``name``
    is that of the attention which planned last."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        tried: Sequence[tuple[str, Candidate]] | None = None,
    ) -> None:
        self.name = "none has planned yet"
        self._model = (config, dtype, device)
        self._tried = candidates() if tried is None else tried
        self._chosen: dict[int, PagedAttention] = {}

    def plan(self, batch: AttentionBatch) -> PlannedAttention:
        """As `PagedAttention` says."""
        chosen = self._chosen.get(batch.page_size)
        if chosen is None:
            chosen = self._chosen[batch.page_size] = choose_attention(
                *self._model, batch.page_size, self._tried
            )
        self.name = chosen.name
        return chosen.plan(batch)


def choose_attention(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    page_size: int,
    tried: Sequence[tuple[str, Candidate]],
) -> PagedAttention:
    """The first of the candidates that is right; plain attention if none is."""
    passed_over = []
    for name, make in tried:
        try:
            attention = make(device)
            error = error_of(attention, config, dtype, device, page_size)
        except Exception as reason:  # noqa: BLE001 - whatever a candidate fails with, the next one serves
            passed_over.append(
                f"{name}: {str(reason).strip().splitlines()[0] if str(reason).strip() else repr(reason)}"
            )
            continue
        if error <= TOLERANCE:
            _log.info("attention: %s (passed over: %s)", attention.name, "; ".join(passed_over) or "none")
            return attention
        passed_over.append(f"{name}: off by {error:.3g} of the largest value")
    if passed_over:
        _log.warning("attention: plain, which is slow (passed over: %s)", "; ".join(passed_over))
    return PlainAttention()


def error_of(
    attention: PagedAttention,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    page_size: int = 16,
) -> float:
    """The largest error over small batches, as a share of the largest value; NaN counts as infinite."""
    return max(_error(attention, *trial(config, dtype, device, page_size, *shape)) for shape in _TRIALS)


@torch.inference_mode()
def _error(attention: PagedAttention, batch: AttentionBatch, tensors: Tensors) -> float:
    query, key, value, cached = tensors
    found = attention.plan(batch).attend(query, key, value, cached, lambda: None).double()
    exact = replace(batch, dtype=torch.float64)
    plain = PlainAttention().plan(exact)
    expected = plain.attend(query.double(), key.double(), value.double(), cached.double(), lambda: None)
    share = ((found - expected).abs().max() / expected.abs().max()).item()
    return share if math.isfinite(share) else math.inf


def trial(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    page_size: int,
    queries: Sequence[int],
    contexts: Sequence[int],
) -> tuple[AttentionBatch, Tensors]:
    """A batch of rows of these lengths and its tensors. Slots that no row owns hold large values, so that reading one
    shows."""
    generator = torch.Generator().manual_seed(0)
    kv_heads, head_dim = config.kv_heads, config.head_dim

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    pages = 2 * sum(-(-context // page_size) for context in contexts)
    tables, free = [], torch.randperm(pages, generator=generator)
    for context in contexts:
        count = -(-context // page_size)
        tables.append(free[:count])
        free = free[count:]
    tokens = sum(queries)
    key, value = random(tokens, kv_heads, head_dim), random(tokens, kv_heads, head_dim)
    cached = torch.full((2, pages * page_size, kv_heads, head_dim), 1e4, device=device, dtype=dtype)
    start = 0
    for length, context, table in zip(queries, contexts, tables, strict=True):
        slots = (table[:, None] * page_size + torch.arange(page_size)).reshape(-1)[:context].to(device)
        cached[:, slots] = random(2, context, kv_heads, head_dim)
        new = slots[context - length :]
        cached[0, new], cached[1, new] = key[start : start + length], value[start : start + length]
        start += length
    batch = AttentionBatch(
        queries,
        contexts,
        tables,
        page_size,
        pages * page_size,
        config.heads,
        kv_heads,
        head_dim,
        1.0 / math.sqrt(head_dim),
        dtype,
        device,
    )
    query = random(tokens, kv_heads, config.heads // kv_heads, head_dim)
    return batch, (query, key, value, cached)
