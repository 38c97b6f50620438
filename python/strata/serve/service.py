"""What the routes share: the engine, the settings, the threads for blocking calls, the metrics."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ParamSpec, TypeVar

from strata.config import StrataConfig
from strata.engine.api import EngineProtocol, RequestStream
from strata.errors import RequestError, StrataError
from strata.serve.errors import ApiError
from strata.serve.metrics import ServerMetrics
from strata.serve.observer import Observer

P = ParamSpec("P")
T = TypeVar("T")

DEFAULT_MODEL_NAME = "default"
_WORKERS = 8
_PROBE_WORKERS = 2


@dataclass(frozen=True)
class Readiness:
    """Whether a load balancer should send requests here, and if not, why, in a sentence."""

    ready: bool
    reason: str | None


class _NoTokenizer:
    """Stands where a model has no tokenizer: whatever it is asked for, a client sent text or wants some."""

    def __getattr__(self, name: str) -> Any:
        raise RequestError("this model has no tokenizer: send token ids to /v1/completions")


@dataclass(frozen=True)
class Service:
    """One engine as it is served. Lives as long as the app."""

    engine: EngineProtocol
    config: StrataConfig
    metrics: ServerMetrics
    workers: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(_WORKERS, thread_name_prefix="strata-http")
    )
    probe_workers: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(_PROBE_WORKERS, thread_name_prefix="strata-probe")
    )
    """For those who ask whether the server lives: they must not wait behind what clients make it do."""
    admin_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by one flush or demote at a time, so that these cannot take all the workers."""
    streams: set[RequestStream] = field(default_factory=set)
    """Streams that are being answered. Only the event loop's thread changes it."""
    leaving: threading.Event = field(default_factory=threading.Event)
    """Set once the server is asked to stop: it may still answer, but nobody should come any more."""
    created: int = field(default_factory=lambda: int(time.time()))
    observer: Observer = field(init=False)

    def __post_init__(self) -> None:
        observer = Observer(self.engine, self.call, self.config.server.prompt_excerpts)
        object.__setattr__(self, "observer", observer)

    @property
    def model_name(self) -> str:
        """The name that answers carry."""
        return self.model_names[0]

    @property
    def model_names(self) -> list[str]:
        """The names under which clients may ask for the model, that of answers first."""
        return list(dict.fromkeys((*self.config.model.names(self.engine.model_name), DEFAULT_MODEL_NAME)))

    @property
    def tokenizer(self) -> Any:
        """The engine's; of a model that has none, one whose every use raises RequestError."""
        return _NoTokenizer() if self.engine.tokenizer is None else self.engine.tokenizer

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs a function that may block in a worker thread: the event loop must go on for all other
        clients."""
        return await self._run(self.workers, partial(function, *args, **kwargs))

    async def probe(self, function: Callable[[], T]) -> T:
        """As `call`, for probes."""
        return await self._run(self.probe_workers, function)

    async def _run(self, workers: ThreadPoolExecutor, function: Callable[[], T]) -> T:
        try:
            result = asyncio.get_running_loop().run_in_executor(workers, function)
        except RuntimeError as error:  # the workers take nothing more
            raise StrataError("the server has stopped; send the request again later") from error
        return await result

    def check_model(self, name: str | None) -> None:
        """Raises ApiError 404 unless `name` is one of the served model's, or left out."""
        if name and name not in self.model_names:
            raise ApiError(
                404,
                f"the model {name!r} is not served here; use {' or '.join(map(repr, self.model_names))}",
                "model_not_found",
                "model",
            )

    def check_alive(self) -> None:
        """Raises ApiError 503 once the engine cannot answer."""
        health = self.engine.health()
        if not health.ok:
            raise ApiError(
                503,
                f"the engine has stopped: {'; '.join(health.problems) or 'no reason given'}",
                "engine_dead",
            )

    def readiness(self) -> Readiness:
        """Whether new requests are welcome here."""
        if self.leaving.is_set():
            return Readiness(False, "the server is asked to stop and finishes what it has")
        health = self.engine.health()
        if not health.ok:
            return Readiness(False, "; ".join(health.problems) or "the engine has stopped")
        return Readiness(health.ready, None if health.ready else "the engine is warming up or shutting down")

    def abort_streams(self) -> None:
        """Ends every answer early; each client is told so. May be called from any thread."""
        for stream in tuple(self.streams):
            stream.abort()

    def close(self) -> None:
        """Gives the worker threads up without waiting for them."""
        for workers in (self.workers, self.probe_workers):
            workers.shutdown(wait=False, cancel_futures=True)
