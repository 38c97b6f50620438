"""What transfers cost the model: a prefill loop and a decode loop of Llama-8B's layers, alone and beside loads or
backups that go on for all of it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from gpu_proof.budget import Budget
from gpu_proof.pools import Memory, PoolPair
from gpu_proof.shapes import DIRECTIONS, PAGE_16, Direction
from strata.device.cuda_runtime import CudaRuntime, Stream
from strata.device.kernels import BACKUP_BLOCKS, LOAD_BLOCKS

BLOCKS: dict[Direction, int] = {"load": LOAD_BLOCKS, "backup": BACKUP_BLOCKS}
MARGIN = 1.5
"""Transfers are queued for this many times what the loop takes alone."""
MOST_TRIES = 4


class Loop(Protocol):
    """Compute to be disturbed. `queue` puts it on the current stream, the same amount each time."""

    name: str

    def queue(self) -> None: ...


@dataclass(frozen=True)
class Disturbed:
    """``slowdown`` is the share by which the loop takes longer, from medians of rounds that alternate."""

    loop: str
    direction: Direction
    blocks: int
    alone_ms: float
    beside_ms: float
    slowdown: float
    transfer_gb_per_s: float
    rounds: int

    def json(self) -> dict[str, object]:
        """As it stands in the result."""
        return asdict(self)


def measure_interference(
    memory: Memory, loops: list[Callable[[], Loop]], rounds: int, budget: Budget
) -> list[Disturbed]:
    """Each loop beside loads, then beside backups."""
    pair = memory.pair(PAGE_16)
    compute = memory.runtime.compute_stream()
    found = []
    for make in loops:
        loop = make()
        for direction in DIRECTIONS:
            if budget.allows(f"{loop.name} beside a {direction}"):
                found.append(_disturb(memory, pair, loop, direction, compute, rounds))
        del loop
    return found


def _disturb(
    memory: Memory, pair: PoolPair, loop: Loop, direction: Direction, compute: Stream, rounds: int
) -> Disturbed:
    runtime, blocks = memory.runtime, BLOCKS[direction]
    _run(runtime, loop, compute)
    one = min(pair.kernels(direction, blocks)().seconds for _ in range(3))
    count = 1 + math.ceil(MARGIN * _run(runtime, loop, compute) / one)
    alone, beside, rates = [], [], []
    for _ in range(rounds):
        alone.append(_run(runtime, loop, compute))
        for _ in range(MOST_TRIES):
            seconds, rate, outlasted = _beside(memory, pair, loop, direction, count, compute)
            if outlasted:
                break
            count *= 2
        else:
            raise RuntimeError(f"{count} transfers end before the {loop.name} loop: nothing was disturbed")
        beside.append(seconds)
        rates.append(rate)
    return Disturbed(
        loop.name,
        direction,
        blocks,
        statistics.median(alone) * 1e3,
        statistics.median(beside) * 1e3,
        statistics.median(b / a for a, b in zip(alone, beside, strict=True)) - 1,
        statistics.median(rates) / 1e9,
        rounds,
    )


def _run(runtime: CudaRuntime, loop: Loop, compute: Stream) -> float:
    began = runtime.now()
    loop.queue()
    runtime.synchronize(compute)
    return runtime.now() - began


def _beside(
    memory: Memory, pair: PoolPair, loop: Loop, direction: Direction, count: int, compute: Stream
) -> tuple[float, float, bool]:
    """Seconds of the loop, bytes a second of the transfers, and whether these outlasted it."""
    runtime = memory.runtime
    end = runtime.create_event()
    began = runtime.now()
    for _ in range(count):
        pair.queue(direction, BLOCKS[direction], memory.stream)
    runtime.record(end, memory.stream)
    seconds = _run(runtime, loop, compute)
    outlasted = not runtime.query(end)
    runtime.synchronize(memory.stream)
    rate = count * pair.bytes / (runtime.now() - began)
    runtime.destroy_event(end)
    return seconds, rate, outlasted


@dataclass(frozen=True)
class LoopShape:
    """Sizes of a decoder layer and of the work on it; the defaults are Llama-8B's."""

    hidden: int = 4096
    inner: int = 14336
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    layers: int = 4
    prefill_tokens: int = 2048
    decode_rows: int = 64
    decode_context: int = 2048
    prefill_repeats: int = 8
    decode_repeats: int = 30


class _Layers:
    """Weights of a few layers, more than a cache holds."""

    def __init__(self, shape: LoopShape, device: str, dtype: torch.dtype) -> None:
        self.shape = shape
        width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim

        def drawn(*sizes: int) -> torch.Tensor:
            return torch.randn(sizes, device=device, dtype=dtype).mul_(sizes[0] ** -0.5)

        self._layers = [
            (
                drawn(shape.hidden, width),
                drawn(shape.heads * shape.head_dim, shape.hidden),
                drawn(shape.hidden, 2 * shape.inner),
                drawn(shape.inner, shape.hidden),
            )
            for _ in range(shape.layers)
        ]

    @torch.inference_mode()
    def forward(
        self, hidden: torch.Tensor, attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    ) -> None:
        shape = self.shape
        for projection, output, gate_up, down in self._layers:
            heads = (hidden @ projection).unflatten(1, (-1, shape.head_dim))
            query, key, value = heads.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
            hidden = hidden + attend(query, key, value).flatten(1) @ output
            gate, up = (F.rms_norm(hidden, (shape.hidden,)) @ gate_up).chunk(2, dim=-1)
            hidden = hidden + (F.silu(gate) * up) @ down


class PrefillLoop:
    """A long chunk through the layers, several times."""

    name = "prefill"

    def __init__(self, shape: LoopShape, device: str, dtype: torch.dtype = torch.bfloat16) -> None:
        self._layers, self._shape = _Layers(shape, device, dtype), shape
        self._hidden = torch.randn(shape.prefill_tokens, shape.hidden, device=device, dtype=dtype)

    def queue(self) -> None:
        """As `Loop` says."""
        for _ in range(self._shape.prefill_repeats):
            self._layers.forward(self._hidden, self._attend)

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        group = self._shape.heads // self._shape.kv_heads
        keys, values = (part.repeat_interleave(group, dim=1).transpose(0, 1) for part in (key, value))
        found = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None], keys[None], values[None], is_causal=True
        )
        return found[0].transpose(0, 1)


class DecodeLoop:
    """One token of each of many rows through the layers, several times, each over a context of its own."""

    name = "decode"

    def __init__(self, shape: LoopShape, device: str, dtype: torch.dtype = torch.bfloat16) -> None:
        self._layers, self._shape = _Layers(shape, device, dtype), shape
        self._hidden = torch.randn(shape.decode_rows, shape.hidden, device=device, dtype=dtype)
        context = (shape.decode_rows, shape.kv_heads, shape.decode_context, shape.head_dim)
        self._key, self._value = (torch.randn(context, device=device, dtype=dtype) for _ in range(2))

    def queue(self) -> None:
        """As `Loop` says."""
        for _ in range(self._shape.decode_repeats):
            self._layers.forward(self._hidden, self._attend)

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        # The query heads that share a KV head are simply more queries.
        grouped = query.unflatten(1, (self._shape.kv_heads, -1))
        return F.scaled_dot_product_attention(grouped, self._key, self._value).flatten(1, 2)
