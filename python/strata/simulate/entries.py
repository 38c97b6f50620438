"""Entries of the table of constants by name, or out of files that take the place of one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from strata.errors import ConfigError
from strata.simulate.constants import names
from strata.simulate.workloads import workload_file

_FILES = {"workloads": (".json", ".jsonl")}
_JSON = (".json",)


def named(table: dict[str, Any], section: str, flag: str, given: str | None) -> str:
    """The name of the entry that `--flag given` asks for. A file's content becomes an entry of `table`: hardware, a
    model (an entry, or its config.json), or a workload (what a converter wrote, or a trace). Raises ConfigError."""
    known = names(section, table)
    if given in known:
        return str(given)
    suffixes = _FILES.get(section, _JSON)
    path = Path(given or "")
    if path.suffix.lower() not in suffixes:
        told = f"--{flag} is missing" if given is None else f"--{flag} {given!r} is unknown"
        files = "" if section == "systems" else f", or name a {' or '.join(suffixes)} file"
        raise ConfigError(f"{told}: choose {', '.join(known)}{files}")
    # Nobody names an entry so, and a message shows where it came from.
    name = f"{flag} of {path.name}"
    entry = workload_file(path, f"--{flag}") if section == "workloads" else _entry(path, flag)
    if section == "models" and "config" not in entry:
        entry = {"config": entry}
    if section == "hardware":
        entry = {"name": path.stem, **entry}
    table[section] = {**table[section], name: entry}
    return name


def _entry(path: Path, flag: str) -> dict[str, Any]:
    try:
        entry = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--{flag} {path} cannot be read as JSON: {error}; give another file") from error
    if not isinstance(entry, dict):
        raise ConfigError(f"--{flag} {path} is no JSON object; see the entries of the table of constants")
    return dict(entry)
