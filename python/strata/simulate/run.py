"""From names to a configuration, from a configuration to a report. Nothing is decided here."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from strata import _core
from strata.errors import ConfigError
from strata.simulate import constants
from strata.simulate.report import Report


@dataclass(frozen=True)
class Traced:
    """A report, and what happened when as Chrome's trace events (`ts` and `dur` in microseconds)."""

    report: Report
    timeline: dict[str, Any]


def configure(
    hardware: str,
    model: str,
    system: str,
    workload: str,
    overrides: Mapping[str, Any] | None = None,
    table: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A simulation by names out of `table` (default: Strata's own), with `overrides` laid over it field by field, as
    deep as they go: `{"workload": {"rate": 2.0}, "seed": 1, "warm": True}`.

    Raises ConfigError that names what the table has, or the field that does not fit.
    """
    chosen = constants.table() if table is None else table
    text = _core.simulation_config(
        _text(chosen, "the table"), hardware, model, system, workload, _text(overrides or {}, "overrides")
    )
    return dict(json.loads(text))


def simulate(config: Mapping[str, Any], policy: object | None = None) -> Report:
    """Runs one simulation. Raises ConfigError, and StrataError if it comes to no end."""
    return _run({**config, "timeline": False}, policy).report


def simulate_traced(config: Mapping[str, Any], policy: object | None = None) -> Traced:
    """As `simulate`, with the timeline."""
    return _run({**config, "timeline": True}, policy)


def simulate_many(configs: Iterable[Mapping[str, Any]], workers: int | None = None) -> list[Report]:
    """Runs simulations side by side, on as many threads as there are cores unless `workers` says otherwise: they let
    go of the interpreter's lock. Reports come in the order of the configurations; the first error ends it all.
    """
    with ThreadPoolExecutor(workers or len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(simulate, configs))


def _run(config: Mapping[str, Any], policy: object | None) -> Traced:
    result = json.loads(_core.simulate(_text(config, "the configuration"), policy))
    return Traced(result["report"], result["timeline"] or {})


def _text(value: Mapping[str, Any], what: str) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{what} cannot be written as JSON: {error}; give numbers, text, lists") from error
