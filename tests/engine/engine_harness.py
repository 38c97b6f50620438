"""What the engine's tests share: a tiny float64 model whose greedy answers can be proved exact, engines over pools of
a few pages, and clients that read streams.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from strata._core import LayerHold
from strata.config import StrataConfig
from strata.device.cuda_runtime import CudaRuntime
from strata.engine import Chunk, Engine, GenerationRequest, RequestStream, SamplingParams, ServedModel
from strata.models import CausalLM, ForwardBatch, tiny_random_model

VOCABULARY = 97
HOST_ALIGNMENT = 4096
IDLE_S = 20.0
"""Longest that an engine without requests may need until nothing is in flight."""


def tiny_served(seed: int = 0, digest: str | None = None, model: CausalLM | None = None) -> ServedModel:
    """A float64 model that handles token ids alone. `digest` stands for its weight files."""
    return ServedModel(model or tiny_random_model(seed), None, f"tiny-{seed}", digest or f"tiny-{seed}")


@dataclass(frozen=True)
class Sizes:
    """Pages of the tiers in memory, and bytes of the one on disk."""

    page: int = 4
    device: int = 100
    host: int = 256
    disk_bytes: int = 4 << 20

    def page_bytes(self, model: CausalLM) -> int:
        """Bytes of one page of `model`'s KV."""
        config = model.config
        return config.layers * 2 * config.kv_heads * config.head_dim * model.dtype.itemsize * self.page


def engine_of(
    root: Path,
    sizes: Sizes | None = None,
    served: ServedModel | None = None,
    hold: LayerHold | None = None,
    cuda: CudaRuntime | None = None,
    **settings: object,
) -> Engine:
    """An engine whose disk tier lies in `root`; `settings` are any settings of `StrataConfig`. Unless they say
    otherwise, what a tier holds is used however long that takes: a test must not depend on what is quicker."""
    settings = {**BY_RULE, **settings}
    if cuda is not None:
        settings = {"device": "cuda", "write_policy": "through", **settings}
    sizes, served = sizes or Sizes(), served or tiny_served()
    page = sizes.page_bytes(served.model)
    host_page = -(-page // HOST_ALIGNMENT) * HOST_ALIGNMENT
    config = StrataConfig.of(
        page_size=sizes.page,
        device_memory=sizes.device * page,
        host_memory=sizes.host * host_page,
        disk_path=root,
        disk_capacity=sizes.disk_bytes,
        **settings,
    )
    engine = Engine(config, served, hold, cuda)
    watcher = getattr(served.model, "watcher", None)
    if watcher is not None:
        watcher.watch()
    return engine


BY_RULE = {"load_policy": "always", "prefetch_policy": "wait"}
"""Settings under which no measured time decides where a prompt's tokens come from."""
MakeEngine = Callable[..., Engine]
"""`engine_of` as the fixture `make_engine` gives it: the root is the test's own, and the end is taken care of."""


@dataclass
class Answer:
    """What came out of one stream."""

    tokens: list[int] = field(default_factory=list)
    last: Chunk | None = None

    @property
    def reason(self) -> str | None:
        """Why the answer ended."""
        return self.last.finish_reason if self.last else None

    @property
    def sources(self) -> tuple[int, int, int, int]:
        """Prompt tokens by source: device, host, disk, computed."""
        assert self.last is not None and self.last.usage is not None
        found = self.last.usage.sources
        return found.device, found.host, found.disk, found.computed


def read(stream: RequestStream, abort_after: int | None = None) -> Answer:
    """Reads a stream to its end; aborts it once `abort_after` tokens have come."""
    answer = Answer()
    if abort_after == 0:
        stream.abort()
    for chunk in stream:
        assert answer.last is None or answer.last.finish_reason is None, "a chunk after the last"
        answer.tokens.extend(chunk.token_ids)
        answer.last = chunk
        if abort_after is not None and len(answer.tokens) >= abort_after:
            stream.abort()
    assert answer.last is not None and answer.last.usage is not None, "no last chunk with its usage"
    return answer


def ask(
    engine: Engine, prompt: Sequence[int], max_tokens: int = 8, salt: str = "", **sampling: object
) -> Answer:
    """One request, alone."""
    params = SamplingParams(max_tokens=max_tokens, **sampling)
    return read(engine.submit(GenerationRequest(prompt, params, salt)))


def wrong_at(model: CausalLM, prompt: Sequence[int], tokens: Sequence[int]) -> int | None:
    """The first generated token that is not the greedy one of the whole sequence computed at once; None if all are.

    One forward over prompt and answer proves every token: by induction each prefix is the greedy one.
    """
    if not tokens:
        return None
    logits = model.reference_forward([*prompt, *tokens[:-1]])
    greedy = logits[len(prompt) - 1 :].argmax(dim=-1).tolist()
    return next(
        (index for index, (one, two) in enumerate(zip(greedy, tokens, strict=True)) if one != two), None
    )


def assert_exact(model: CausalLM, prompt: Sequence[int], answer: Answer) -> None:
    """Fails with the place of the first wrong token."""
    place = wrong_at(model, prompt, answer.tokens)
    assert place is None, f"token {place} of {answer.tokens} after {len(prompt)} prompt tokens is wrong"


def wait_idle(engine: Engine, limit_s: float = IDLE_S) -> None:
    """Waits until nothing runs or moves; then no page may be pinned, reserved or quarantined."""
    deadline = time.monotonic() + limit_s
    # Between the two questions Core may have begun to clear records that left the tree.
    while not engine.check() or (stats := engine.stats())["transfers_in_flight"]:
        assert time.monotonic() < deadline, f"not idle after {limit_s} s: {nonzero(engine)}"
        time.sleep(0.005)
    for tier in ("device", "host", "disk"):
        assert stats[f"{tier}_pinned_pages"] == 0
        assert stats[f"{tier}_quarantined_pages"] == 0
        assert stats[f"{tier}_used_pages"] == stats[f"{tier}_resident_pages"]
    assert stats["running"] == stats["waiting"] == stats["transfers_in_flight"] == 0


def nonzero(engine: Engine) -> dict[str, float]:
    """The counters that have counted."""
    return {name: value for name, value in engine.stats().items() if value}


class WatchedModel:
    """Wraps a model's `forward` for a test, from its engine's start on (the warm-up is not watched).

    `before(batch)` runs first; `events` has each layer's cached pages "wanted" and "had", in order.
    """

    def __init__(self, seed: int = 0) -> None:
        self.model = tiny_random_model(seed)
        self.served = tiny_served(seed, model=self.model)
        self.forwards = 0
        self.events: list[tuple[str, int]] = []
        self.pages: dict[int, list[int]] = {}
        """The page table of the row that computed this many tokens of context last."""
        self.before: Callable[[ForwardBatch], None] = lambda batch: None
        self._forward = self.model.forward
        self.model.watcher = self  # type: ignore[attr-defined]

    def watch(self) -> None:
        """Begins to watch."""
        self.model.forward = self._watched  # type: ignore[method-assign]

    def _watched(
        self, batch: ForwardBatch, pool: torch.Tensor, wait_layer: Callable[[int], None]
    ) -> torch.Tensor:
        self.forwards += 1
        for length, table in zip(batch.context_lengths, batch.page_tables, strict=True):
            self.pages[length] = table.tolist()
        self.before(batch)

        def wait(layer: int) -> None:
            self.events.append(("wanted", layer))
            wait_layer(layer)
            self.events.append(("had", layer))

        return self._forward(batch, pool, wait)


def eventually(true: Callable[[], bool], limit_s: float = 20.0) -> bool:
    """Whether something becomes true in time."""
    deadline = time.monotonic() + limit_s
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True
