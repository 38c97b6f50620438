"""Every setting that Strata has: one frozen dataclass a part, checked once, when it is made.

The field's name is the setting's name everywhere: `page_size` is the flag `--page-size`, the environment
variable `STRATA_PAGE_SIZE` and the key `page-size` of a TOML file. Names are unique over all parts.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from strata.config.knobs import (
    check_part,
    choice,
    count,
    day,
    expanded,
    flag_of,
    format_size,
    fraction,
    number,
    path,
    seconds,
    size,
    switch,
    text,
    texts,
)
from strata.config.machine import available_memory, disk_space
from strata.errors import ConfigError

_ORIGIN = re.compile(r"null|[A-Za-z][\w+.-]*://[^\s/?#@]+")

AUTO_SIZE = -1
"""Stands for a size that is worked out from the machine; no options object holds it once it is made."""

GIB = 1 << 30
_DEVICE_MEMORY_SHARE = 0.25
_DISK_CAPACITY_SHARE = 0.10
_DISK_CAPACITY_MOST = 10 * GIB


def default_disk_path() -> Path:
    """Where the disk tier lies unless told: `strata/kv` in the user's cache folder. Raises ConfigError where there is
    none."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return expanded(cache) / "strata" / "kv"
    except ValueError as error:
        raise ConfigError(
            f"{flag_of('disk_path')} is not given, and its default lies in {cache}, but this user has no home "
            f"({error}); give {flag_of('disk_path')}, or set HOME or XDG_CACHE_HOME"
        ) from error


@dataclass(frozen=True)
class ModelOptions:
    """Which model is run, and how."""

    model: str = field(
        default="default",
        metadata=text(
            "`default` (SmolLM2-135M-Instruct), a Hugging Face folder, a .gguf file, or a name on the hub: "
            "org/name or org/name@revision"
        ),
    )
    device: str = field(
        default="cpu",
        metadata=choice(
            "what computes and holds the device tier; cuda is an NVIDIA GPU and needs the extra `cuda`",
            "cpu",
            "cuda",
        ),
    )
    dtype: str = field(
        default="auto",
        metadata=choice(
            "number format of weights and KV cache; auto is float32 on a CPU, bfloat16 on a GPU",
            "auto",
            "float32",
            "float64",
            "bfloat16",
            "float16",
        ),
    )
    served_model_name: tuple[str, ...] = field(
        default=(),
        metadata=texts(
            "names by which clients know the model; answers carry the first; empty: the model's own; `default` always "
            "does as well"
        ),
    )
    max_model_len: int = field(
        default=0,
        metadata=count(
            "most tokens of a prompt and its answer together; 0: the model's own length", 0, 1 << 30
        ),
    )
    generation_config: str = field(
        default="auto",
        metadata=choice(
            "how requests are sampled that do not say so: auto as the model's generation_config.json says, none by "
            "OpenAI's defaults",
            "auto",
            "none",
        ),
    )
    threads: int = field(
        default=0, metadata=count("threads that compute; 0: one for each usable core", 0, 1024)
    )
    chat_template_date: str = field(
        default="",
        metadata=day(
            "day that chat templates take for today, such as 2024-07-26: where a template writes the date into every "
            "prompt, tomorrow's prompts match nothing of today's; empty: today"
        ),
    )

    def __post_init__(self) -> None:
        check_part(self)

    def names(self, own: str) -> tuple[str, ...]:
        """By which clients know the model, whose own name is `own`; answers carry the first."""
        return self.served_model_name or (own,)


@dataclass(frozen=True)
class CacheOptions:
    """The tiers of the KV cache and what moves between them. A size of 0 turns the host or disk tier off."""

    page_size: int = field(default=16, metadata=count("tokens in a page, the unit of matching", 1, 256))
    device_memory: int = field(
        default=AUTO_SIZE,
        metadata=size(
            "size of the device tier; default: 25% of the memory that is left, on a GPU 80% of its own", 1
        ),
    )
    host_memory: int = field(default=GIB, metadata=size("size of the host tier; 0 turns it off"))
    disk_path: Path = field(default_factory=default_disk_path, metadata=path("folder of the disk tier"))
    disk_capacity: int = field(
        default=AUTO_SIZE,
        metadata=size(
            "size of the disk tier, over all models; 0 turns it off; default: 10 GiB or 10% of free space"
        ),
    )
    write_policy: str = field(
        default="through",
        metadata=choice(
            "when device pages are copied to the host: every new page, at the n-th access, or before eviction",
            "through",
            "selective",
            "back",
        ),
    )
    disk_write_policy: str = field(
        default="through",
        metadata=choice(
            "when host pages (without a host tier: device pages) are written to disk",
            "through",
            "selective",
            "back",
        ),
    )
    selective_accesses: int = field(
        default=2,
        metadata=count("the n of the policy selective; being created is the first access", 1, 100),
    )
    prefetch_policy: str = field(
        default="adaptive",
        metadata=choice(
            "how long a request waits for its pages from disk: while reading beats computing, not at all, "
            "for all of them, or for a time that grows with the prompt",
            "adaptive",
            "best_effort",
            "wait",
            "timeout",
        ),
    )
    prefetch_timeout_s: float = field(
        default=30.0,
        metadata=seconds("longest wait of --prefetch-policy adaptive, and the base of timeout", 0.0, 3600.0),
    )
    prefetch_timeout_per_1k_s: float = field(
        default=1.0,
        metadata=seconds("what --prefetch-policy timeout adds for each 1,000 prompt tokens", 0.0, 3600.0),
    )
    prefetch_share: float = field(
        default=0.8,
        metadata=fraction("part of the host tier that pages read for waiting requests may fill"),
    )
    disk_bytes_per_day: int = field(
        default=0,
        metadata=size("most bytes written to the disk tier in any 24 hours, to spare an SSD; 0: no limit"),
    )
    copy_threads: int = field(
        default=0,
        metadata=count("threads that copy between host and device; 0: chosen from the cores", 0, 16),
    )
    load_policy: str = field(
        default="quicker",
        metadata=choice(
            "load what the host holds only while that is predicted to be quicker than computing, or always",
            "quicker",
            "always",
        ),
    )
    backup_niceness: int = field(
        default=0,
        metadata=count(
            "copies to the host yield to computing threads by this niceness; 0: they share the load threads",
            0,
            19,
        ),
    )
    disk_engine: str = field(
        default="auto",
        metadata=choice("what executes the disk's I/O", "auto", "io_uring", "threads"),
    )
    disk_depth: int = field(default=32, metadata=count("most disk I/Os that are in flight at once", 1, 1024))
    disk_bandwidth: int = field(
        default=0,
        metadata=size("emulate a slow disk: bytes a second each way; 0: as fast as it goes"),
    )
    disk_threads: int = field(default=4, metadata=count("threads that read and write the disk tier", 1, 64))
    copy_bandwidth: int = field(
        default=0,
        metadata=size("emulate a slow link between host and device: bytes a second; 0: as fast as it goes"),
    )

    def __post_init__(self) -> None:
        if self.device_memory == AUTO_SIZE:
            object.__setattr__(self, "device_memory", int(available_memory() * _DEVICE_MEMORY_SHARE))
        if self.disk_capacity == AUTO_SIZE:
            share = int(disk_space(self.disk_path) * _DISK_CAPACITY_SHARE)
            object.__setattr__(self, "disk_capacity", min(_DISK_CAPACITY_MOST, share))
        if self.device_memory == 0:
            raise ConfigError(
                f"{flag_of('device_memory')} 0 leaves no device tier, and nothing can be computed without; "
                f"give a size such as {format_size(GIB)}, or leave it out for 25% of the memory that is left"
            )
        check_part(self)


@dataclass(frozen=True)
class SchedulerOptions:
    """How waiting requests become batches."""

    policy: str = field(
        default="adaptive",
        metadata=choice(
            "how waiting requests become batches: adaptive and static balance loads against compute (by predicted "
            "times, or by --load-ratio), lpm takes the longest cached prefix first, fcfs the first come",
            "adaptive",
            "static",
            "lpm",
            "fcfs",
        ),
    )
    scheduler_off: str = field(
        default="",
        metadata=text(
            "parts of adaptive and static to turn off, with commas between: defer, followers, balance, bundles, "
            "bubbles, early-loads, worth, passing"
        ),
    )
    deferral_tokens: int = field(
        default=100,
        metadata=count("a request waits for another that computes more of its prompt than this", 0, 1 << 30),
    )
    deferral_factor: float = field(
        default=2.0,
        metadata=number(
            "such a wait lasts at most this many times what computing that part itself would take, from each news on",
            0.0,
            1000.0,
        ),
    )
    load_ratio: float = field(
        default=100.0,
        metadata=number("static: loaded tokens that one computed token hides", 0.0, 1e9),
    )
    early_share: float = field(
        default=0.25, metadata=fraction("part of the device tier that loads for waiting requests may take")
    )
    max_wait_s: float = field(
        default=60.0, metadata=seconds("whoever has waited longer goes before any priority", 0.0, 86400.0)
    )
    max_decode_stall_ms: int = field(
        default=1000,
        metadata=count(
            "longest predicted gap between two tokens of a running stream while prompts are computed; 0: no bound",
            0,
            3_600_000,
        ),
    )
    batch_tokens: int = field(
        default=512, metadata=count("most prompt tokens computed in one step", 1, 1 << 20)
    )
    max_running: int = field(default=64, metadata=count("most requests that run at once", 1, 4096))
    max_waiting: int = field(
        default=1024, metadata=count("most requests that wait; more are refused", 1, 1 << 20)
    )
    outstanding_plans: int = field(
        default=2,
        metadata=count("batches that may be planned ahead of the device, the running one included", 1, 2),
    )

    def __post_init__(self) -> None:
        check_part(self)


@dataclass(frozen=True)
class ServerOptions:
    """The HTTP server."""

    host: str = field(default="127.0.0.1", metadata=text("address to listen on"))
    port: int = field(default=8000, metadata=count("port to listen on; 0: any free one", 0, 65535))
    api_key: tuple[str, ...] = field(
        default=(),
        metadata=texts(
            "keys of which clients must send one as `Authorization: Bearer KEY`; empty: no key", secret=True
        ),
    )
    admin_api_key: tuple[str, ...] = field(
        default=(),
        metadata=texts(
            "keys for the routes that change the server or tell of other users' requests; empty: those of --api-key",
            secret=True,
        ),
    )
    insecure: bool = field(
        default=False, metadata=switch("allow an address that others can reach, without an API key")
    )
    leave_notice_s: float = field(
        default=0.0,
        metadata=seconds(
            "at a stop, how long requests are still taken while /ready says no, so that load balancers look away first",
            0.0,
            600.0,
        ),
    )
    salt_per_key: bool = field(
        default=False, metadata=switch("requests with different API keys never share cached pages")
    )
    allowed_hosts: tuple[str, ...] = field(
        default=(),
        metadata=texts(
            "names under which clients may ask, beside the address listened on and localhost; * allows any"
        ),
    )
    allowed_origins: tuple[str, ...] = field(
        default=(),
        metadata=texts("other web pages that may ask, such as https://chat.example.com; * allows any"),
    )
    max_body_bytes: int = field(
        default=4 << 20, metadata=size("largest body of a request; a larger one is refused", 1024)
    )
    max_connections: int = field(
        default=2048, metadata=count("most connections; requests on others are refused", 1, 1 << 16)
    )
    max_concurrency_per_key: int = field(
        default=0,
        metadata=count(
            "most requests that one API key may have under way; without keys all count together; 0: no limit",
            0,
            1 << 16,
        ),
    )
    client_timeout_s: float = field(
        default=60.0,
        metadata=seconds(
            "longest that a client may take to send its request, or to read what waits for it", 0.1, 3600.0
        ),
    )
    drain_timeout_s: float = field(
        default=30.0, metadata=seconds("at a stop, how long running requests may take to finish", 0.0, 3600.0)
    )
    demote_timeout_s: float = field(
        default=30.0, metadata=seconds("at a stop, how long pages may be written to disk", 0.0, 3600.0)
    )
    log_level: str = field(
        default="info",
        metadata=choice(
            "least severe messages that are printed; info has a line a request",
            "debug",
            "info",
            "warning",
            "error",
        ),
    )
    sse_keepalive_s: float = field(
        default=10.0,
        metadata=seconds(
            "a streamed answer that has nothing to say for this long sends a comment with its progress, for proxies "
            "and read timeouts; 0: none",
            0.0,
            3600.0,
        ),
    )
    prompt_excerpts: bool = field(
        default=True,
        metadata=switch(
            "show a few words of prompts on the page and in /status, around the point where two of them part"
        ),
    )
    log_format: str = field(
        default="text",
        metadata=choice("lines for people, or one JSON object a line for a log collector", "text", "json"),
    )
    step_log: str = field(
        default="",
        metadata=text(
            "file that gets a line of JSON for every step: its size and its time, no text; empty: none is written"
        ),
    )

    def __post_init__(self) -> None:
        check_part(self)
        if self.salt_per_key and not self.api_key:
            raise ConfigError(
                "--salt-per-key parts the keys of --api-key, and there is none; give at least one"
            )
        if self.salt_per_key and len(self.api_key) > 1 and not self.admin_api_key:
            raise ConfigError(
                "--salt-per-key parts several keys of --api-key, but without --admin-api-key each may read words of "
                "the others' prompts under /status and flush their pages; give --admin-api-key KEY (better in the "
                "variable STRATA_ADMIN_API_KEY)"
            )
        for origin in self.allowed_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"--allowed-origins {origin!r} is no origin; give scheme, host and port as a browser sends them, "
                    "e.g. https://chat.example.com"
                )
