"""What a decision of the scheduler costs with many requests waiting, in the Core that serves.

All who wait have their prompts in host memory alone and would make a batch loading-bound, and half of them
ask about one document: a decision looks at everybody, sets all but the head aside, and fills its batch with
those. Before each decision one request leaves and one comes. Then the shared document is evicted, and the
queue is brought up to date.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np

from strata._core import measure_decisions
from strata.bench.report import JSON_HELP, Bound, bounds_table, check_json_path, emit, table_of
from strata.bench.settings import manifest
from strata.errors import ConfigError

BOUNDS = {1_000: (20.0, None), 10_000: (100.0, 500.0)}
"""Requests that wait -> the most microseconds of a decision: median, 99th percentile."""


def measure(waiting: int, policy: str, decisions: int) -> dict[str, Any]:
    """Microseconds of a decision, and of an eviction for each request that it concerns.

    Raises ConfigError, and StorageError if Core does not get into the state to be measured.
    """
    spans, event_us = measure_decisions(waiting, policy, decisions)
    p50, p99 = (float(value) for value in np.percentile(spans, (50, 99)))
    return {
        "waiting": waiting,
        "policy": policy,
        "decision_us_p50": p50,
        "decision_us_p99": p99,
        "event_us_amortised": event_us,
    }


def bounds_of(result: dict[str, Any]) -> list[Bound]:
    """What is promised for this many requests; nothing for other numbers."""
    p50, p99 = BOUNDS.get(result["waiting"], (None, None))
    found = []
    if p50 is not None:
        found.append(Bound("decision, median", result["decision_us_p50"], p50, "us", f"{p50:.0f} us"))
    if p99 is not None:
        found.append(Bound("decision, p99", result["decision_us_p99"], p99, "us", f"{p99:.0f} us"))
    return found


def main(arguments: Sequence[str], program: str = "python -m strata.bench sched") -> int:
    """Measures and reports. Returns 0; raises StrataError."""
    parser = argparse.ArgumentParser(
        prog=program,
        allow_abbrev=False,
        description="What a decision of the scheduler costs with many requests waiting.",
    )
    parser.add_argument("--waiting", type=int, default=10_000, help="requests (default: 10000)")
    parser.add_argument(
        "--policy", default="adaptive", help="fcfs, lpm, static or adaptive (default: adaptive)"
    )
    parser.add_argument("--decisions", type=int, default=2_000, help="to measure (default: 2000)")
    parser.add_argument("--json", metavar="FILE", help=JSON_HELP)
    options = parser.parse_args(arguments)
    if options.waiting < 2:
        raise ConfigError(f"--waiting {options.waiting} is too small; give at least 2")
    if options.decisions < 1:
        raise ConfigError(f"--decisions {options.decisions} is too small; give at least 1")
    check_json_path(options.json)
    facts = manifest(program, None, arguments=list(arguments), decisions=options.decisions)
    result = {**measure(options.waiting, options.policy, options.decisions), "manifest": facts}
    emit(result, _tables(result), options.json)
    return 0


def _tables(result: dict[str, Any]) -> list[Any]:
    rows = [
        ("a decision, median", f"{result['decision_us_p50']:.1f}"),
        ("a decision, 99th percentile", f"{result['decision_us_p99']:.1f}"),
        ("an eviction, for each request that it concerns", f"{result['event_us_amortised']:.2f}"),
    ]
    title = f"microseconds, {result['waiting']:,} requests waiting, policy {result['policy']}"
    bounds = bounds_of(result)
    return [table_of(title, ("what", "us"), rows), *([bounds_table(bounds)] if bounds else [])]
