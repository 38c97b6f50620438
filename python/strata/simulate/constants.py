"""The table of constants: hardware, models, systems and workloads by name, each number with its unit and source.

A table of one's own takes the place of the one that comes with Strata; whatever is drawn from it changes with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from strata.errors import ConfigError

SHIPPED = Path(__file__).parent / "data" / "constants.json"
SECTIONS = ("hardware", "models", "systems", "workloads")
ROOT_OF_SYSTEMS = "base"
"""What every system extends; not a system of its own."""


def table(path: Path | None = None) -> dict[str, Any]:
    """The table at `path` (`--constants`), or the one that comes with Strata.

    Raises ConfigError if it cannot be read, is no JSON or lacks a section.
    """
    where = path or SHIPPED
    try:
        found = json.loads(where.expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--constants {where} cannot be read: {error}; name another file") from error
    except ValueError as error:
        raise ConfigError(f"--constants {where} is no JSON: {error}; start from {SHIPPED}") from error
    lacking = [name for name in SECTIONS if not isinstance(found, dict) or name not in found]
    if lacking:
        raise ConfigError(f"--constants {where} lacks {', '.join(lacking)}; start from {SHIPPED}")
    return dict(found)


def names(section: str, of: Mapping[str, Any] | None = None) -> list[str]:
    """The names in a section: `hardware`, `models`, `systems` or `workloads`. Raises ConfigError."""
    if section not in SECTIONS:
        raise ConfigError(f"section {section!r} is unknown: choose {', '.join(SECTIONS)}")
    entries = (table() if of is None else of)[section]
    return [name for name in entries if (section, name) != ("systems", ROOT_OF_SYSTEMS)]
