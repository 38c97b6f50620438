"""Time to the first token of a prompt that is computed, found on the device, loaded from the host or read from disk,
through the engine; and whether its pages come back with the bytes that they left with.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpu_proof.budget import Budget
from strata.config import StrataConfig
from strata.device.cuda_runtime import CudaRuntime
from strata.engine import Engine, GenerationRequest, SamplingParams, ServedModel
from strata.models import CausalLM, ForwardBatch, ModelConfig
from strata.models.weights import RandomWeights

LLAMA_8B = ModelConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    layers=32,
    heads=32,
    kv_heads=8,
    head_dim=128,
    context_length=131072,
    rope_theta=500000.0,
)
TIERS = ("cold", "device", "host", "disk")
IDLE_S = 30.0


@dataclass(frozen=True)
class TierSettings:
    """Sizes of one measurement; ``tokens`` are found in a tier, ``new`` are computed after them."""

    config: ModelConfig = LLAMA_8B
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"
    page_size: int = 16
    tokens: int = 8192
    new: int = 512
    answer: int = 4
    prompts: int = 2
    """Prompts that the tiers have room for; older ones make way."""
    seed: int = 0

    @property
    def page_bytes(self) -> int:
        """Of one page in memory."""
        return self.page_size * self.config.kv_elements_per_token * self.dtype.itemsize


class PageWatch:
    """Wraps a model's `forward` and keeps the bytes of one prompt's first pages as the step leaves them."""

    def __init__(self, model: CausalLM, pages: int) -> None:
        self.kept: torch.Tensor | None = None
        self.on = False
        self._pages = pages
        self._forward = model.forward
        model.forward = self._watched  # type: ignore[method-assign]

    def _watched(
        self, batch: ForwardBatch, pool: torch.Tensor, wait_layer: Callable[[int], None]
    ) -> torch.Tensor:
        logits = self._forward(batch, pool, wait_layer)
        if self.on and len(batch.page_tables[0]) >= self._pages:
            table = batch.page_tables[0][: self._pages].to(pool.device)
            self.kept = pool.index_select(2, table)
            self.on = False
        return logits


def measure_tiers(
    settings: TierSettings, rounds: int, budget: Budget, cuda: CudaRuntime | None = None
) -> dict[str, Any]:
    """``ttft_ms`` by tier (medians), ``tokens_found`` by tier, ``changed_pages``, ``page_bytes`` and ``rounds``. Raises
    what the engine raises; RuntimeError if a hit comes from elsewhere."""
    device = torch.device(settings.device)
    model = CausalLM(settings.config, RandomWeights(settings.seed, settings.config, settings.dtype, device))
    served = ServedModel(model, None, "random", f"random-{settings.seed}")
    with tempfile.TemporaryDirectory() as folder, _engine(settings, Path(folder), served, cuda) as engine:
        watch = PageWatch(model, settings.tokens // settings.page_size)
        changed = _changed_pages(engine, settings, watch)
        times: dict[str, list[float]] = {tier: [] for tier in TIERS}
        about = 0.0
        for turn in range(1, rounds + 1):
            if not budget.allows(f"round {turn} of {rounds} of time to first token", about):
                break
            before = budget.left_s()
            for tier in TIERS:
                times[tier].append(_ask(engine, settings, turn, tier))
            about = before - budget.left_s()
        return {
            "attention": model.attention.name,
            "tokens": settings.tokens,
            "new_tokens": settings.new,
            "page_bytes": settings.page_bytes,
            "rounds": len(times["disk"]),
            "ttft_ms": {tier: statistics.median(found) * 1e3 for tier, found in times.items() if found},
            "changed_pages": changed,
        }


def _engine(settings: TierSettings, folder: Path, served: ServedModel, cuda: CudaRuntime | None) -> Engine:
    """Tiers with room for a few prompts. ``cuda`` moves the pages, wherever the model is."""
    tokens = settings.prompts * (
        settings.tokens + len(TIERS) * (settings.new + settings.answer + settings.page_size)
    )
    memory = settings.page_bytes * -(-tokens // settings.page_size)
    # Host pages and records begin at multiples of 4 KiB.
    below = memory + 8192 * -(-tokens // settings.page_size)
    config = StrataConfig.of(
        page_size=settings.page_size,
        device_memory=memory,
        host_memory=below,
        disk_path=folder,
        disk_capacity=2 * below,
        load_policy="always",
        prefetch_policy="wait",
        device="cpu" if cuda is None and settings.device == "cpu" else "cuda",
    )
    return Engine(config, served, cuda=cuda)


def _changed_pages(engine: Engine, settings: TierSettings, watch: PageWatch) -> int:
    """Pages of a prompt that differ after host or disk from what was computed. Warms everything up on the way."""
    kept = []
    for tier in TIERS:
        watch.on = True
        _ask(engine, settings, 0, tier)
        if watch.kept is None:
            raise RuntimeError(f"no step held the {settings.tokens} tokens of the prompt ({tier})")
        kept.append(watch.kept)
        watch.kept = None
    computed = kept[0].movedim(2, 0).flatten(1).view(torch.uint8)
    return sum(
        int((found.movedim(2, 0).flatten(1).view(torch.uint8) != computed).any(dim=1).sum())
        for found in kept[1:]
    )


def _ask(engine: Engine, settings: TierSettings, turn: int, tier: str) -> float:
    """Seconds to the first token of one prompt whose first part is in ``tier`` alone, its last part nowhere."""
    place = TIERS.index(tier)
    _wait_idle(engine)
    if place > 1:
        engine.demote(list(TIERS[1:place]))
    draw = torch.Generator().manual_seed(settings.seed + 1000 * turn)
    vocabulary = settings.config.vocab_size
    shared = torch.randint(0, vocabulary, (settings.tokens,), generator=draw).tolist()
    # The first new token differs from tier to tier, so that the part behind `shared` is found nowhere.
    own = [place, *torch.randint(0, vocabulary, (settings.new - 1,), generator=draw).tolist()]
    request = GenerationRequest([*shared, *own], SamplingParams(max_tokens=settings.answer, ignore_eos=True))
    last = list(engine.submit(request))[-1]
    if last.usage is None:
        raise RuntimeError(f"the request ended with {last.finish_reason} and no usage")
    found = last.usage.sources
    expected = 0 if tier == "cold" else settings.tokens
    came = {"cold": 0, "device": found.device, "host": found.host, "disk": found.disk}[tier]
    if came != expected or found.cached != expected:
        raise RuntimeError(f"{expected} tokens should have come from {tier}, but these did: {found}")
    return last.usage.ttft_s


def _wait_idle(engine: Engine) -> None:
    deadline = time.monotonic() + IDLE_S
    while not engine.check():
        if time.monotonic() > deadline:
            raise RuntimeError(f"the engine was not idle after {IDLE_S} s: {engine.stats()}")
        time.sleep(0.005)
