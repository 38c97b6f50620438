"""From names to a configuration, from a configuration to a report. Nothing is decided here."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

from strata import _core
from strata.errors import ConfigError, StrataError
from strata.simulate import constants
from strata.simulate.policy import QueueOrder, WaitingRequest
from strata.simulate.report import Report

RATE_FIELDS = {"documents": "rate", "conversations": "rate", "tool_agents": "agents_per_second"}
"""Kind of workload -> the field that says how much arrives in a second."""


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


def simulate(config: Mapping[str, Any], policy: QueueOrder | None = None) -> Report:
    """Runs one simulation, in the order of `policy` instead of the system's own if one is given.

    Raises ConfigError, and StrataError if it comes to no end or if the policy fails.
    """
    return _run({**config, "timeline": False}, policy, None).report


def simulate_traced(config: Mapping[str, Any], policy: QueueOrder | None = None) -> Traced:
    """As `simulate`, with the timeline."""
    return _run({**config, "timeline": True}, policy, None)


def simulate_many(configs: Iterable[Mapping[str, Any]], workers: int | None = None) -> list[Report]:
    """Runs simulations side by side and returns their reports in the order of the configurations.

    On as many threads as there are cores unless `workers` says otherwise: a simulation does not hold the interpreter's
    lock. An error, or Ctrl-C, ends them all.
    """
    over = threading.Event()

    def go_on() -> None:
        if over.is_set():
            raise _OverError

    def one(config: Mapping[str, Any]) -> Report:
        go_on()
        return _run({**config, "timeline": False}, None, go_on).report

    with ThreadPoolExecutor(workers or len(os.sched_getaffinity(0))) as pool:
        try:
            futures = [pool.submit(one, config) for config in configs]
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            over.set()
    for future in futures:
        error = future.exception()
        if error is not None and not isinstance(error, _OverError):
            raise error
    return [future.result() for future in futures]


def at_rate(config: Mapping[str, Any], rate: float) -> dict[str, Any]:
    """The same simulation with `rate` arrivals per second: of requests, or of what the workload counts by (sessions,
    agents). Raises ConfigError if it has no rate, or if `rate` is none.
    """
    kind = config["workload"]["kind"]
    if kind not in RATE_FIELDS:
        raise ConfigError(
            f"--rate {rate:g}: a workload of the kind {kind!r} brings its own arrivals; change them in it, or stretch "
            "a trace with --set workload.time_scale=NUMBER"
        )
    if not 0.0 < rate < math.inf:
        raise ConfigError(f"--rate {rate:g} is no rate; give arrivals per second above 0")
    return {**config, "workload": {**config["workload"], RATE_FIELDS[kind]: rate}}


class _OverError(StrataError):
    """Another simulation ended it."""


def _run(config: Mapping[str, Any], policy: QueueOrder | None, watch: Callable[[], object] | None) -> Traced:
    order = None if policy is None else partial(_order, policy)
    result = json.loads(_core.simulate(_text(config, "the configuration"), order, watch))
    return Traced(result["report"], result["timeline"] or {})


def _order(policy: QueueOrder, rows: Sequence[tuple[Any, ...]], now: float) -> list[int]:
    return list(policy.order([WaitingRequest._make(row) for row in rows], now))


def _text(value: Mapping[str, Any], what: str) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{what} cannot be written as JSON: {error}; give numbers, text, lists") from error
