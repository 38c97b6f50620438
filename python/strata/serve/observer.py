"""What the server knows of its own past, for `/status` and the page: its requests and the engine's counters over time.

While requests are answered or somebody looks, the counters are sampled every `history.SAMPLE_S` seconds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping

from strata.engine.api import TIERS, EngineProtocol, GenerationRequest, RequestStream
from strata.errors import StrataError
from strata.serve.history import SAMPLE_S, History
from strata.serve.recent import Recent

LINKS = ("load", "backup", "prefetch", "spill")
_LOOKED_S = 10.0
"""How long after a look the counters are sampled without a request."""
_COUNTERS = (
    *(f"prompt_tokens_{tier}" for tier in TIERS),
    "prefilled_tokens",
    *(f"{link}_bytes" for link in LINKS),
    "load_stall_ns",
    "generated_tokens",
    "saved_s",
)

Sampled = Callable[[Callable[[], Mapping[str, float]]], Awaitable[Mapping[str, float]]]


class Observer:
    """Watches one engine. `call` runs a function that may block outside of the event loop."""

    def __init__(self, engine: EngineProtocol, call: Sampled, excerpts: bool) -> None:
        self.began = time.monotonic()
        self.recent = Recent(excerpts, self.keep_sampling)
        self.history = History(_COUNTERS)
        self.history.add({})
        self._engine = engine
        self._call = call
        self._looked = 0.0
        self._sampler: asyncio.Task[None] | None = None

    def submit(self, request: GenerationRequest) -> RequestStream:
        """Queues a request and watches it. Blocks; raises what the engine does."""
        if self._sampler is None:
            self.history.resume()
        return self.recent.watch(self._engine.submit(request), request)

    def stats(self) -> dict[str, float]:
        """The engine's counters of now, which become a sample too. Blocks."""
        stats = dict(self._engine.stats())
        stats["saved_s"] = self.recent.saved_s
        self.history.add(stats)
        return stats

    def looked(self) -> None:
        """Somebody looks: sampling goes on for a while. In the event loop."""
        self._looked = time.monotonic()
        self.keep_sampling()

    def keep_sampling(self) -> None:
        """Starts the samples unless they are being taken. In the event loop."""
        if self._sampler is None:
            self._sampler = asyncio.get_running_loop().create_task(self._sample())

    async def _sample(self) -> None:
        try:
            busy = True
            while busy:
                # Asked before: the last sample comes after the last request.
                busy = bool(self.recent.running()) or time.monotonic() - self._looked < _LOOKED_S
                await self._call(self.stats)
                await asyncio.sleep(SAMPLE_S if busy else 0)
        except StrataError:
            # The engine has stopped; `/health` says why, and its counters grow no more.
            pass
        finally:
            self._sampler = None
