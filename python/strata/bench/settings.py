"""The settings a measurement runs with: every flag of `strata serve`, and a disk tier of its own.

A measurement forgets and moves pages, so it never works in a cache that somebody uses.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import platform
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import strata
from strata.config import StrataConfig, read_config
from strata.config.options import default_disk_path
from strata.config.sources import DEFAULT_ORIGIN, PARTS
from strata.errors import ConfigError

ENGINE_FLAGS_HELP = (
    "Every flag of `strata serve` for model, cache and scheduler works too, e.g. --model, --host-memory "
    "2GiB, --copy-bandwidth. The disk tier is a new folder, removed at the end, unless --disk-path names an "
    "empty one."
)


@contextmanager
def bench_config(
    arguments: Sequence[str], program: str, environment: Mapping[str, str] | None = None
) -> Iterator[StrataConfig]:
    """The settings of a run. Raises ConfigError if `--disk-path` holds files: they would be lost."""
    config = read_config(arguments, environment, program)
    if config.origin("disk_path") != DEFAULT_ORIGIN:
        folder = config.cache.disk_path
        if config.cache.disk_capacity and folder.exists() and any(folder.iterdir()):
            raise ConfigError(
                f"--disk-path {folder} holds files, and a measurement empties its disk tier: name a folder "
                "that is empty or does not exist, or leave the flag out"
            )
        yield config
        return
    parent = default_disk_path().parent
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=parent, ignore_cleanup_errors=True) as folder_name:
        yield read_config([*arguments, "--disk-path", folder_name], environment, program)


def settings_of(config: StrataConfig) -> dict[str, Any]:
    """Every setting and its value, secrets and the server's part left out."""
    return {
        field.name: str(value) if isinstance(value, Path) else value
        for part in PARTS
        if part != "server"
        for field in dataclasses.fields(getattr(config, part))
        for value in [getattr(getattr(config, part), field.name)]
        if field.name != "disk_path"
    }


def manifest(program: str, seed: int | None, **more: Any) -> dict[str, Any]:
    """What somebody needs to repeat the run and to judge it; times are left to the measurement."""
    return {
        "program": program,
        "version": strata.__version__,
        "seed": seed,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "processor": _processor(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "load_average_at_start": os.getloadavg()[0],
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", ""),
        **more,
    }


def _processor() -> str:
    """The processor's name, as Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def check_least(options: argparse.Namespace, least: Iterable[tuple[str, int]]) -> None:
    """Raises ConfigError that names the first option below its least value."""
    for name, value in least:
        if getattr(options, name) < value:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} {getattr(options, name)} is too small; give at least {value}")
