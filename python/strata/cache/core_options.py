"""From settings to the options of `strata._core.Runtime`, all of them: for Strata's engine and for foreign ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from strata.config import CacheOptions, SchedulerOptions, format_size
from strata.errors import ConfigError

RECORD_ALIGNMENT = 4096
"""Host pages start at multiples of this, as O_DIRECT asks."""


MOST_PAGES = (1 << 32) - 1
"""Pages of a tier are numbered by 32 bits."""


@dataclass(frozen=True)
class Geometry:
    """The shape of a page and the number of pages of the tiers in memory."""

    layers: int
    parts: int
    token_bytes: int
    device_pages: int
    host_pages: int
    host_pages_most: int
    fingerprint: bytes


def host_page_bytes(page_bytes: int) -> int:
    """What a page of `page_bytes` bytes takes in host memory."""
    return -(-page_bytes // RECORD_ALIGNMENT) * RECORD_ALIGNMENT


def host_pages_in(memory: int, page_bytes: int) -> int:
    """Pages of `page_bytes` bytes in a host tier of `memory` bytes. Raises ConfigError for more than have a number."""
    page = host_page_bytes(page_bytes)
    if memory // page > MOST_PAGES:
        raise ConfigError(
            f"--host-memory {format_size(memory)} holds {memory // page} pages of {format_size(page)}, and "
            f"{MOST_PAGES} can be told apart; give at most {format_size(MOST_PAGES * page)}, or a larger --page-size"
        )
    return memory // page


def core_options(
    cache: CacheOptions, scheduler: SchedulerOptions, geometry: Geometry, copy_threads: int, write_policy: str
) -> dict[str, Any]:
    """The options of `Runtime`. `write_policy` and `copy_threads` are what `cache` leaves to the device."""
    return {
        "page_size": cache.page_size,
        "layers": geometry.layers,
        "parts": geometry.parts,
        "token_bytes": geometry.token_bytes,
        "device_pages": geometry.device_pages,
        "host_pages": geometry.host_pages,
        "host_pages_most": geometry.host_pages_most,
        "disk_path": cache.disk_path,
        "disk_capacity": cache.disk_capacity,
        "fingerprint": list(geometry.fingerprint),
        "write_policy": write_policy,
        "disk_write_policy": cache.disk_write_policy,
        "selective_accesses": cache.selective_accesses,
        "policy": scheduler.policy,
        "scheduler_off": [part.strip() for part in scheduler.scheduler_off.split(",") if part.strip()],
        "deferral_tokens": scheduler.deferral_tokens,
        "deferral_factor": scheduler.deferral_factor,
        "load_ratio": scheduler.load_ratio,
        "early_share": scheduler.early_share,
        "max_wait_s": scheduler.max_wait_s,
        "max_decode_stall_ms": scheduler.max_decode_stall_ms,
        "batch_tokens": scheduler.batch_tokens,
        "max_running": scheduler.max_running,
        "max_waiting": scheduler.max_waiting,
        "outstanding_plans": scheduler.outstanding_plans,
        "prefetch_policy": cache.prefetch_policy,
        "prefetch_timeout_s": cache.prefetch_timeout_s,
        "prefetch_timeout_per_1k_s": cache.prefetch_timeout_per_1k_s,
        "prefetch_share": cache.prefetch_share,
        "disk_bytes_per_day": cache.disk_bytes_per_day,
        "copy_threads": copy_threads,
        "disk_threads": cache.disk_threads,
        "disk_engine": cache.disk_engine,
        "disk_depth": cache.disk_depth,
        "disk_bandwidth": cache.disk_bandwidth,
        "load_policy": cache.load_policy,
        "backup_niceness": cache.backup_niceness,
        "copy_bandwidth": cache.copy_bandwidth,
    }
