"""What a measurement asks: an engine in this process, its tiers put where the measurement wants them.

Times are a client's: from the moment before a request is handed over until its first piece is read.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from strata.config import StrataConfig
from strata.engine import GenerationRequest, SamplingParams, TokenSources
from strata.engine.engine import Engine
from strata.engine.served_model import ServedModel
from strata.errors import StorageError

_POLL_S = 0.0005
_SETTLE_TIMEOUT_S = 120.0
_MAINTENANCE_TIMEOUT_S = 120.0
_SHUTDOWN_S = 60.0


@dataclass(frozen=True)
class Answer:
    """One answer: seconds to the first token, what came out, and where the prompt's tokens came from."""

    ttft_s: float
    tokens: tuple[int | str, ...]
    sources: TokenSources


class Target(Protocol):
    """A served model whose tiers can be emptied. Raises StrataError where it cannot do as asked."""

    def ask(self, token_ids: Sequence[int], max_tokens: int) -> Answer:
        """Asks alone, greedily, for exactly `max_tokens` tokens."""

    def settle(self) -> None:
        """Returns once nothing runs, waits or moves."""

    def demote(self, tiers: Sequence[str]) -> None:
        """Empties the tiers downward."""

    def flush(self) -> None:
        """Forgets everything."""

    def restart(self) -> None:
        """Stops, then starts anew over the same disk tier; the page cache keeps none of its files."""

    def close(self) -> None:
        """Stops."""


class EngineTarget:
    """Implements `Target` over the Engine API, without HTTP. A restart makes a new engine in this process."""

    def __init__(self, config: StrataConfig, served: ServedModel) -> None:
        self.config = config
        self._served = served
        self._engine = Engine(config, served)

    @property
    def engine(self) -> Engine:
        """The engine that runs now."""
        return self._engine

    def ask(self, token_ids: Sequence[int], max_tokens: int) -> Answer:
        """Asks alone, greedily, for exactly `max_tokens` tokens."""
        request = GenerationRequest(token_ids, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
        start = time.perf_counter()
        first = None
        tokens: list[int] = []
        sources = TokenSources()
        for chunk in self._engine.submit(request):
            if first is None:
                first = time.perf_counter() - start
            tokens.extend(chunk.token_ids)
            sources = chunk.usage.sources if chunk.usage else sources
        return Answer(first or 0.0, tuple(tokens), sources)

    def read_from_disk(self, token_ids: Sequence[int], pages: int) -> tuple[int, float]:
        """Bytes and seconds of bringing a prompt's pages from disk to host, and no further: the engine's own
        reading and checking. Raises StorageError if they do not come."""
        before = self._engine.stats()
        request = GenerationRequest(token_ids, SamplingParams(max_tokens=1))
        start = time.perf_counter()
        stream = self._engine.submit(request)
        wanted = before["prefetch_pages"] + pages
        wait_for(
            lambda: self._engine.stats()["prefetch_pages"] >= wanted,
            f"{pages} pages were to come from disk, and did not",
        )
        seconds = time.perf_counter() - start
        stream.abort()
        for _ in stream:
            pass
        self.settle()
        return int(pages * before["page_bytes"]), seconds

    def settle(self) -> None:
        """Returns once nothing runs, waits or moves."""
        wait_for(self._is_idle, "the engine did not come to rest")

    def _is_idle(self) -> bool:
        stats = self._engine.stats()
        return not any(stats[name] for name in ("running", "waiting", "transfers_in_flight"))

    def demote(self, tiers: Sequence[str]) -> None:
        """Empties the tiers downward."""
        self._engine.demote(tiers, _MAINTENANCE_TIMEOUT_S)

    def flush(self) -> None:
        """Forgets everything."""
        self._engine.flush(_MAINTENANCE_TIMEOUT_S)

    def restart(self) -> None:
        """Stops, then starts anew over the same disk tier; the page cache keeps none of its files."""
        self._engine.shutdown(drain_s=0.0, demote_s=_SHUTDOWN_S)
        self._engine = Engine(self.config, self._served)
        drop_page_cache(self.config.cache.disk_path)

    def close(self) -> None:
        """Stops; pages are not moved to disk first."""
        self._engine.shutdown(drain_s=0.0, demote_s=0.0)


def drop_page_cache(folder: Path) -> None:
    """Makes the system forget the files' contents, so that the next read is one of the device's."""
    for path in folder.rglob("*"):
        if not path.is_file():
            continue
        descriptor = os.open(path, os.O_RDONLY)
        try:
            # What is not yet written cannot be forgotten.
            os.fdatasync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def wait_for(condition: Callable[[], bool], complaint: str) -> None:
    """Polls until `condition` holds twice in a row, since work may pass from one thread to another. Raises
    StorageError."""
    deadline = time.monotonic() + _SETTLE_TIMEOUT_S
    held = False
    while True:
        holds = condition()
        if holds and held:
            return
        held = holds
        if time.monotonic() > deadline:
            raise StorageError(f"{complaint} within {_SETTLE_TIMEOUT_S:g} s; the engine's log says why")
        if not holds:
            time.sleep(_POLL_S)
