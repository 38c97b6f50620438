"""Which attention a device gets: the first in an order of preference that proves itself there.

What is installed differs from machine to machine and version to version, so nothing is taken on trust: each candidate
attends batches of chunks and decodes over scattered pages, up to the last ones of the pool, and has to agree with plain
arithmetic. One that is right but far slower than another is passed over too. The log says which one serves and why
those before it do not. Only a kernel that takes the device's context down with it is beyond this.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

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

_LONG_TRIAL = ((1,), (8209,))
"""One decode of a long context over the pool's last pages: ways that split a context, and offsets that do not fit into
32 bits, show there or nowhere."""
_TIMED = tuple(((1, 1, 1), (2000 + step, 300 + step, 40 + step)) for step in range(3))
"""Decode steps, one token apart as those of an answer: a first one that may still prepare, and two that count."""
TOO_SLOW = 20.0
"""How many times longer than the fastest way a decode step may take. Kernels differ by less; what takes longer builds
or compiles something at each step."""
_FREE_SHARE = 0.25
"""Of the device's free memory that the pool of a trial may take."""

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Query, key, value and one layer's pool, as `PlannedAttention.attend` takes them."""
Candidate = Callable[[torch.device], PagedAttention]


@dataclass(frozen=True)
class Place:
    """Where attention has to work: shapes, and the pool's pages as far as they are known."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    page_size: int = 16
    pages: int = 0


Measure = Callable[[PagedAttention, Place], float]
"""Seconds of one decode step."""


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
        measure: Measure | None = None,
    ) -> None:
        self.name = "none has planned yet"
        self._place = Place(config, dtype, device)
        self._tried = candidates() if tried is None else tried
        self._measure = measure or decode_seconds
        self._chosen: dict[int, PagedAttention] = {}
        self._windowed = PlainAttention()

    def plan(self, batch: AttentionBatch) -> PlannedAttention:
        """As `PagedAttention` says."""
        if batch.window is not None:
            # The kernels know no window. They serve such a model's batches as long as no context outgrows it.
            self.name = self._windowed.name
            return self._windowed.plan(batch)
        chosen = self._chosen.get(batch.page_size)
        if chosen is None:
            pages = batch.slots // batch.page_size
            place = replace(self._place, page_size=batch.page_size, pages=pages)
            chosen = self._chosen[batch.page_size] = choose_attention(place, self._tried, self._measure)
            if place.device.type == "cuda":
                # What the trials took goes back to whoever else needs the device's memory.
                torch.cuda.empty_cache()
        self.name = chosen.name
        return chosen.plan(batch)


def choose_attention(
    place: Place, tried: Sequence[tuple[str, Candidate]], measure: Measure | None = None
) -> PagedAttention:
    """The first of the candidates that is right and not far slower than another; plain attention if none is. Those
    behind one that is right and at least as fast as plain attention are not asked: each may have to be compiled."""
    measure = measure or decode_seconds
    plain = PlainAttention()
    plain_s = measure(plain, place) if tried else 0.0
    right: list[tuple[PagedAttention, float]] = []
    passed_over = []
    for name, make in tried:
        try:
            attention = make(place.device)
            error = error_of(attention, place)
            if error > TOLERANCE:
                passed_over.append(f"{name}: off by {error:.3g} of the largest value")
                continue
            seconds = measure(attention, place)
        except torch.OutOfMemoryError as reason:
            _log.warning(
                "attention: %s was not tried to the end, the device's memory ran out (%s): it may well be right; "
                "give a smaller --device-memory to leave it more",
                name,
                _first_line(reason),
            )
            passed_over.append(f"{name}: out of memory")
            continue
        except Exception as reason:  # noqa: BLE001 - whatever a candidate fails with, the next one serves
            passed_over.append(f"{name}: {_first_line(reason)}")
            continue
        right.append((attention, seconds))
        if seconds <= plain_s:
            break
    right.append((plain, plain_s))
    chosen = first_quick_enough([seconds for _, seconds in right])
    passed_over += [
        f"{attention.name}: right, but a decode step takes it {seconds * 1e3:.3g} ms"
        for attention, seconds in right[:chosen]
    ]
    attention, seconds = right[chosen]
    reasons = "; ".join(passed_over) or "none"
    if attention is not plain:
        _log.info(
            "attention: %s, %.3g ms a decode step (passed over: %s)", attention.name, seconds * 1e3, reasons
        )
    elif tried:
        _log.warning("attention: plain, which is slow (passed over: %s)", reasons)
    return attention


def first_quick_enough(seconds: Sequence[float]) -> int:
    """The place of the first that takes at most `TOO_SLOW` times as long as the fastest."""
    fastest = min(seconds)
    return next(place for place, taken in enumerate(seconds) if taken <= TOO_SLOW * fastest)


def _first_line(reason: BaseException) -> str:
    lines = str(reason).strip().splitlines()
    return lines[0] if lines else repr(reason)


@torch.inference_mode()
def decode_seconds(attention: PagedAttention, place: Place) -> float:
    """What a decode step costs, plan included, one layer, when contexts are a token longer than at the last one."""
    taken = []
    for queries, contexts in _TIMED:
        batch, (query, key, value, cached) = trial(place, queries, contexts)
        began = time.monotonic()
        # To the host: only then is it over.
        attention.plan(batch).attend(query, key, value, cached, _nothing_to_wait_for).cpu()
        taken.append(time.monotonic() - began)
    # Whatever is built anew for each step is in both, a hiccup of the machine in one.
    return min(taken[1:])


def error_of(attention: PagedAttention, place: Place) -> float:
    """The largest error over a few batches, as a share of the largest value; NaN counts as infinite."""
    errors = [_error(attention, *trial(place, *shape)) for shape in _TRIALS]
    return max(*errors, _error(attention, *trial(place, *_LONG_TRIAL, pages=_pages_that_fit(place))))


def _pages_that_fit(place: Place) -> int:
    """Pages of the pool that the device has room for once more, in one layer."""
    if place.device.type != "cuda":
        return place.pages
    page_bytes = 2 * place.page_size * place.config.kv_heads * place.config.head_dim * place.dtype.itemsize
    free, _ = torch.cuda.mem_get_info(place.device)
    return min(place.pages, int(free * _FREE_SHARE) // page_bytes)


@torch.inference_mode()
def _error(attention: PagedAttention, batch: AttentionBatch, tensors: Tensors) -> float:
    query, key, value, cached = tensors
    found = attention.plan(batch).attend(query, key, value, cached, _nothing_to_wait_for).double()
    exact, used = _used_alone(batch, cached)
    plain = PlainAttention().plan(replace(exact, dtype=torch.float64))
    expected = plain.attend(query.double(), key.double(), value.double(), used.double(), _nothing_to_wait_for)
    share = ((found - expected).abs().max() / expected.abs().max()).item()
    return share if math.isfinite(share) else math.inf


def _used_alone(batch: AttentionBatch, cached: torch.Tensor) -> tuple[AttentionBatch, torch.Tensor]:
    """The batch over a pool of its own pages and no others: nobody has room for a large pool in float64."""
    pages = torch.cat(list(batch.page_tables))
    slots = (pages[:, None] * batch.page_size + torch.arange(batch.page_size)).reshape(-1)
    tables = torch.arange(len(pages)).split([len(table) for table in batch.page_tables])
    return replace(batch, page_tables=tables, slots=len(slots)), cached.index_select(
        1, slots.to(cached.device)
    )


def _nothing_to_wait_for() -> None:
    """Everything has been loaded."""


def trial(
    place: Place, queries: Sequence[int], contexts: Sequence[int], pages: int = 0
) -> tuple[AttentionBatch, Tensors]:
    """A batch of rows of these lengths and its tensors. Its pages are scattered over the last of a pool of at least
    twice as many, or of `pages`. Slots that no row owns hold large values, so that reading one shows."""
    generator = torch.Generator().manual_seed(0)
    config, page_size, device, dtype = place.config, place.page_size, place.device, place.dtype
    kv_heads, head_dim = config.kv_heads, config.head_dim

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    counts = [-(-context // page_size) for context in contexts]
    pages = max(pages, 2 * sum(counts))
    scattered = pages - 1 - torch.randperm(2 * sum(counts), generator=generator)
    tables = scattered[: sum(counts)].split(counts)
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
