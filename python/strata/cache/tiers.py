"""The tiers behind a foreign engine's pool: how they are opened, looked at, emptied and closed. `TieredCache` and
`Scheduler` are two ways to use them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy.typing as npt

from strata._core import HostArena, LayerHold, Lease, Plan, Runtime, TransferQueue
from strata.cache.core_options import Geometry, core_options, host_pages_in
from strata.cache.pool import Pool, Tensor
from strata.config import CacheOptions, SchedulerOptions, parse_size
from strata.errors import ConfigError, RequestError, StorageError

TIERS = ("device", "host", "disk")
_NO_DISK = Path("no-disk-tier")
_POLL_S = 0.002


@dataclass(frozen=True)
class TierUsage:
    """Pages of one tier: those it can hold, those that hold something, those that match, those that are pinned among
    the matching ones."""

    capacity: int
    used: int
    cached: int
    pinned: int


class Carrier(Protocol):
    """What moves pages where copy threads cannot: `strata.CudaCarrier`."""

    @property
    def queue(self) -> TransferQueue:
        """Where Core puts transfers."""
        ...

    @property
    def arena(self) -> HostArena:
        """The host tier's memory."""
        ...

    def wait_layer(self, loads: Lease | Plan, layer: int, timeout_s: float) -> str:
        """What the calling thread computes from now on finds the layer: `ready`, `failed` or `timeout`."""
        ...

    def step_begins(self) -> None:
        """What the calling thread computes from now on comes after every step that was reported."""
        ...

    def step_done(self) -> None:
        """What the calling thread has begun to compute uses pages that are about to be published or let go."""
        ...

    def close(self) -> None:
        """Stops moving, after Core's end."""
        ...


MakeCarrier = Callable[[Pool, dict[str, Any]], Carrier]
"""Makes the carrier of a pool, with the options of `Runtime`."""


class Tiers:
    """Device pages in `pool`, host memory and disk. All methods may be called from any thread."""

    _schedules = False
    """Whether `settings` may name fields of `SchedulerOptions` too."""

    def __init__(
        self,
        pool: Tensor | npt.NDArray[Any],
        page_size: int = 16,
        *,
        host_memory: int | str = "1GiB",
        disk_path: str | os.PathLike[str] | None = None,
        disk_capacity: int | str = "10GiB",
        identity: str = "",
        carrier: MakeCarrier | None = None,
        hold: LayerHold | None = None,
        **settings: Any,
    ) -> None:
        self.pool = Pool.of(pool, page_size)
        if carrier is None:
            self.pool.require_ram()
        if disk_path is not None and not identity:
            raise ConfigError(
                "a disk tier outlives this process: give `identity`, a text that names the weights whose K/V this is "
                "(such as a digest of their files), so that no other model ever reads it"
            )
        capacity = 0 if disk_path is None else _bytes(disk_capacity)
        scheduler = self._scheduler_options(settings)
        try:
            cache = CacheOptions(
                page_size=page_size,
                device_memory=self.pool.size_bytes,
                host_memory=_bytes(host_memory),
                disk_path=_NO_DISK if disk_path is None else Path(disk_path),
                disk_capacity=capacity,
                **settings,
            )
        except TypeError as error:
            known = "CacheOptions and SchedulerOptions" if self._schedules else "CacheOptions"
            raise ConfigError(f"{error}: the settings are the fields of strata.config.{known}") from error
        host_pages = host_pages_in(cache.host_memory, self.pool.page_bytes)
        geometry = Geometry(
            layers=self.pool.layers,
            parts=self.pool.parts,
            token_bytes=self.pool.token_bytes,
            device_pages=self.pool.pages,
            host_pages=host_pages,
            host_pages_most=host_pages,
            fingerprint=self.pool.fingerprint(identity),
        )
        threads = cache.copy_threads or min(2, max(1, len(os.sched_getaffinity(0)) // 2))
        options = core_options(cache, scheduler, geometry, threads, cache.write_policy)
        self.options = cache
        self._closed = False
        self.carrier = None if carrier is None else carrier(self.pool, options)
        queue, arena = (None, None) if self.carrier is None else (self.carrier.queue, self.carrier.arena)
        try:
            self._runtime = Runtime(
                options, self.pool.address, self.pool.size_bytes, self.pool.owner, hold, queue, arena
            )
        except BaseException:
            self._close_carrier()
            raise

    @classmethod
    def _scheduler_options(cls, settings: dict[str, Any]) -> SchedulerOptions:
        """Takes the scheduler's out of `settings`."""
        known = {field.name for field in fields(SchedulerOptions)} if cls._schedules else set()
        return SchedulerOptions(**{name: settings.pop(name) for name in known & settings.keys()})

    @property
    def runtime(self) -> Runtime:
        """Core and its Movers. Raises RequestError after `close`."""
        self.ensure_open()
        return self._runtime

    def ensure_open(self) -> None:
        """Raises RequestError after `close`."""
        if self._closed:
            raise RequestError("it was closed: make a new one over the same pool and disk")

    def step_begins(self) -> None:
        """What the calling thread puts on its device's stream from now on may use pages that steps on other streams
        have written or let go. Called where pages are handed out. Does nothing on a CPU."""
        if self.carrier is not None:
            self.carrier.step_begins()

    def step_done(self) -> None:
        """What the calling thread has put on its device's stream uses pages that are about to be published or let go.
        Called where that is so. Does nothing on a CPU, where what was called is done."""
        if self.carrier is not None:
            self.carrier.step_done()

    def usage(self) -> dict[str, TierUsage]:
        """Pages of each tier, by its name: device, host, disk."""
        stats = self.runtime.stats()
        names = ("capacity", "used", "resident", "pinned")
        return {tier: TierUsage(*(int(stats[f"{tier}_{name}_pages"]) for name in names)) for tier in TIERS}

    def stats(self) -> dict[str, float]:
        """Every counter and gauge, by the names that `/metrics` has after `strata_`."""
        return self.runtime.stats()

    def problem(self) -> str | None:
        """What is wrong with the disk tier, or None. A disk that fails costs time and nothing else."""
        engine, problem = self.runtime.disk_state()
        return problem if engine is not None or self.options.disk_capacity else None

    def check(self) -> bool:
        """Proves that tree, pools and pins agree; True if it was idle, when nothing may be pinned. Raises StorageError
        with what does not agree."""
        return self.runtime.check()

    def settle(self, timeout_s: float = 30.0) -> bool:
        """Waits until nothing moves between tiers; False if something still did after `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        while self.runtime.stats()["transfers_in_flight"] > 0:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def demote(self, *tiers: str, timeout_s: float = 30.0) -> dict[str, int]:
        """Empties these tiers downward: what the tier below does not hold is copied first, what is pinned stays.
        Returns pages moved, dropped and kept by tier. Raises RequestError for a tier that there is not."""
        return self.runtime.demote(list(tiers), timeout_s)

    def flush(self, timeout_s: float = 30.0) -> dict[str, int]:
        """Forgets every page that nothing uses, in all tiers. Returns pages dropped and kept by tier. Raises
        StorageError if records on disk could not be cleared."""
        on = [tier for tier, usage in self.usage().items() if usage.capacity]
        report = self.runtime.flush(on, timeout_s)
        if report["not_erased"]:
            raise StorageError(
                f"records in {self.options.disk_path} could not be cleared and may be found again after a restart: "
                "see problem(), then flush again"
            )
        return report

    def close(self, demote_s: float = 30.0) -> None:
        """Moves what memory holds to disk within `demote_s` seconds, syncs and stops. The pool is the caller's again.
        Whoever waits for pages or for a load gets a StrataError. Idempotent. Raises StorageError if the disk refuses.
        """
        if self._closed:
            return
        self._closed = True
        try:
            try:
                self._runtime.refuse_waiting_leases()
                if demote_s > 0 and self._runtime.stats()["disk_capacity_pages"] > 0:
                    move_to_disk(self._runtime, demote_s)
            finally:
                self._runtime.close()
        finally:
            self._close_carrier()

    def _close_carrier(self) -> None:
        if self.carrier is not None:
            self.carrier.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def move_to_disk(runtime: Runtime, limit_s: float) -> dict[str, int]:
    """Moves what is above the disk down, in as many passes through host memory as that takes, within `limit_s` seconds.
    Returns pages moved, dropped and kept by tier."""
    deadline = time.monotonic() + limit_s
    total: dict[str, int] = {}
    above = None
    while (left := deadline - time.monotonic()) > 0:
        done = runtime.demote(["device", "host"], left)
        total = {name: total.get(name, 0) + count for name, count in done.items()}
        kept, moved = (done[f"device_{what}"] + done[f"host_{what}"] for what in ("kept", "moved"))
        # A disk that takes nothing answers at once: passes that bring nothing lower are not repeated.
        if not kept or not moved or (above is not None and kept >= above):
            break
        above = kept
    return total


def _bytes(size: int | str) -> int:
    return parse_size(size) if isinstance(size, str) else size
