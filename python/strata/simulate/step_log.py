"""Reads the file that a server writes under `--step-log`. What it cannot trust it refuses, in words."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from strata.errors import ConfigError

VERSION = 1
"""The form that `strata.engine.step_log` writes."""
KINDS = ("prefill", "decode")
TRANSFERS = ("load", "backup", "spill", "prefetch")
Array = npt.NDArray[np.float64]
_COUNTS = ("rows", "tokens", "context", "pairs", "sampled")
_TIMES = ("at_s", "busy_s", "stalled_s", "rest_s")


@dataclass(frozen=True)
class Transfers:
    """What one kind of transfer moved between two looks at its counters; each [looks]."""

    completed: Array
    bytes: Array
    seconds: Array


@dataclass(frozen=True)
class StepLog:
    """`header` is the first line; `decode` [steps] tells kinds apart; `columns` has each number of a step [steps]."""

    header: Mapping[str, Any]
    decode: npt.NDArray[np.bool_]
    columns: Mapping[str, Array]
    transfers: Mapping[str, Transfers]
    left_out: int

    def __len__(self) -> int:
        return len(self.decode)


def read_step_log(path: Path) -> StepLog:
    """Raises ConfigError for a file that cannot be read, is no step log, is one of another version, or has no step."""
    try:
        lines = path.expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--log {path} cannot be read: {error}; name a file that --step-log wrote"
        ) from error
    if not lines:
        raise ConfigError(f"--log {path} is empty; let a server with --step-log answer some requests first")
    found = [_object(path, number, line) for number, line in enumerate(lines, start=1)]
    header, events = found[0], found[1:]
    if header.get("log") != "strata steps":
        raise ConfigError(
            f"--log {path} is no step log: its first line must say so; start a server with --step-log"
        )
    if header.get("version") != VERSION:
        raise ConfigError(
            f"--log {path} is of version {header.get('version')!r}, and this Strata reads version {VERSION}; write it "
            "anew with this version's --step-log"
        )
    steps = [event for event in events if event.get("kind") in KINDS]
    if not steps:
        raise ConfigError(f"--log {path} has no step; let the server answer some requests first")
    try:
        columns = {name: np.array([float(step[name]) for step in steps]) for name in (*_COUNTS, *_TIMES)}
        moved = [event for event in events if event.get("kind") == "transfers"]
        transfers = {kind: _transfers([event[kind] for event in moved]) for kind in TRANSFERS if moved}
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"--log {path} has a step without {error}; write it anew with --step-log"
        ) from error
    left_out = sum(int(event.get("left_out", 0)) for event in events if event.get("kind") == "end")
    decode = np.array([step["kind"] == "decode" for step in steps])
    return StepLog(header, decode, columns, transfers, left_out)


def _object(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ConfigError(
            f"--log {path} line {number} is no JSON: {error}; a server that was killed leaves half a line: remove it"
        ) from error
    if not isinstance(value, dict):
        raise ConfigError(f"--log {path} line {number} is no object; name a file that --step-log wrote")
    return value


def _transfers(counters: list[Mapping[str, float]]) -> Transfers:
    """Differences between looks, the first of which is at the start of the server."""
    completed, size, busy = (
        np.diff([float(look[name]) for look in counters], prepend=0.0)
        for name in ("completed", "bytes", "busy_ns")
    )
    some = completed > 0
    return Transfers(completed[some], size[some], busy[some] / 1e9)
