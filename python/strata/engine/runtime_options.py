"""From settings to the sizes and options that Core is started with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from strata.cache.core_options import MOST_PAGES, Geometry, core_options, host_page_bytes, host_pages_in
from strata.config import DEFAULT_ORIGIN, CacheOptions, StrataConfig, available_memory, format_size
from strata.device.cuda_runtime import CudaRuntime
from strata.engine.context import ContextBounds
from strata.engine.served_model import ServedModel, usable_cores
from strata.errors import ConfigError
from strata.models import CausalLM

PARTS = 2
"""K and V."""
_GPU_MEMORY_SHARE = 0.8
"""The rest is for what a step computes with."""


@dataclass(frozen=True)
class PoolSizes:
    """Pages of the tiers in memory, and what one page takes."""

    token_bytes: int
    page_bytes: int
    device_pages: int
    host_pages: int
    host_pages_most: int
    copy_threads: int

    @classmethod
    def of(
        cls, model: CausalLM, cache: CacheOptions, device_memory: int | None = None, grows: bool = True
    ) -> PoolSizes:
        """Sizes in whole pages, of `device_memory` bytes if that is not what `cache` says. Without `grows` the host
        tier keeps to the memory that it starts with. Raises ConfigError if the device tier holds none, or the host tier
        more than have numbers."""
        device_memory = cache.device_memory if device_memory is None else device_memory
        config = model.config
        token_bytes = config.kv_heads * config.head_dim * model.dtype.itemsize
        page_bytes = config.layers * PARTS * token_bytes * cache.page_size
        device_pages = device_memory // page_bytes
        if device_pages < 2:
            raise ConfigError(
                f"--device-memory {format_size(device_memory)} holds {device_pages} pages of "
                f"{format_size(page_bytes)}; give at least {format_size(2 * page_bytes)}, or a smaller --page-size"
            )
        # Copies run beside the model: on two cores a second copy thread takes more from it than it brings.
        threads = cache.copy_threads or min(2, max(1, usable_cores() // 2))
        host_pages = host_pages_in(cache.host_memory, page_bytes)
        # Address space is all that this costs: it is what the host tier may grow to at run time.
        room = min(MOST_PAGES, available_memory() // host_page_bytes(page_bytes))
        most = max(host_pages, room) if grows else host_pages
        return cls(token_bytes, page_bytes, device_pages, host_pages, most, threads)

    def context(self, model_length: int, page_size: int, chosen: int) -> ContextBounds:
        """What bounds a prompt and its answer on a model of `model_length` tokens under `--max-model-len`. Raises
        ConfigError if that is more."""
        whole = -(-(chosen or model_length) // page_size) * self.page_bytes
        return ContextBounds(model_length, self.device_pages * page_size, whole, chosen)


def device_memory(config: StrataConfig, device: CudaRuntime | None) -> int | None:
    """Bytes of the device tier where the settings leave them to the device: a share of what it has left."""
    if device is None or config.origin("device_memory") != DEFAULT_ORIGIN:
        return None
    return int(device.memory_info().free * _GPU_MEMORY_SHARE)


def _write_policy(config: StrataConfig) -> str:
    """What a GPU computes is quickly computed again: only what was used twice is worth its way to the host."""
    chosen = config.origin("write_policy") != DEFAULT_ORIGIN or config.model.device == "cpu"
    return config.cache.write_policy if chosen else "selective"


def _refuse_copy_threads(cache: CacheOptions, device: str) -> None:
    """Raises ConfigError for settings of copy threads, which would change nothing."""
    given = {
        "--copy-threads": str(cache.copy_threads or ""),
        "--backup-niceness": str(cache.backup_niceness or ""),
        "--copy-bandwidth": format_size(cache.copy_bandwidth) if cache.copy_bandwidth else "",
    }
    for flag, value in given.items():
        if value:
            raise ConfigError(
                f"{flag} {value} is about threads that copy between device and host, and --device {device} has none: "
                "the device itself moves pages. Leave it out, or serve with --device cpu"
            )


def runtime_options(served: ServedModel, config: StrataConfig, sizes: PoolSizes) -> dict[str, Any]:
    """The options of `strata._core.Runtime`, all of them. Raises ConfigError for what the device cannot do."""
    cache, scheduler = config.cache, config.scheduler
    if config.model.device != "cpu":
        _refuse_copy_threads(cache, config.model.device)
    geometry = Geometry(
        layers=served.model.config.layers,
        parts=PARTS,
        token_bytes=sizes.token_bytes,
        device_pages=sizes.device_pages,
        host_pages=sizes.host_pages,
        host_pages_most=sizes.host_pages_most,
        fingerprint=served.fingerprint(cache.page_size),
    )
    options = core_options(cache, scheduler, geometry, sizes.copy_threads, _write_policy(config))
    # The engine counts and refuses at once. Core still holds requests that were aborted a moment ago: at most all,
    # while as many new ones come. Its own refusal would end an answer whose status has been sent already.
    return {**options, "max_waiting": 2 * scheduler.max_waiting + scheduler.max_running}
