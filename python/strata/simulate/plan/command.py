"""`strata plan --trace FILE --model M --hardware H --ttft-p99 S`: which tiers are the cheapest that are fast enough."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

import strata
from strata.bench.load.plot import check_plot
from strata.bench.report import check_json_path
from strata.errors import ConfigError, StrataError
from strata.simulate.constants import table
from strata.simulate.entries import named
from strata.simulate.plan.planner import Plan, Question, plan
from strata.simulate.plan.prices import prices_of
from strata.simulate.plan.shown import draw, markdown, show
from strata.simulate.plan.tiers import sizes_of
from strata.simulate.run import configure, simulate_many
from strata.simulate.workloads import faster, first_requests, workload_file

UNMET = 3
"""The exit code where no size meets the target."""
_TRACE = "trace"
"""The name of what --trace brings, in the table that is left for one run."""


def parser_of(program: str) -> argparse.ArgumentParser:
    """The command's flags."""
    parser = argparse.ArgumentParser(
        prog=program,
        allow_abbrev=False,
        description="Simulate a trace with tiers of many sizes and name the cheapest with which 99 in 100 requests "
        "have their first token in time.",
        epilog="Exit code 0; 3 if no size meets the target; 1 for an error, 2 for an unknown flag.",
    )
    asked = parser.add_argument_group("what is asked")
    asked.add_argument("--trace", required=True, type=Path, metavar="FILE", help="a trace in Mooncake's form (.jsonl), "
        "or what python -m strata.simulate.convert wrote")  # fmt: skip
    asked.add_argument(
        "--model", required=True, metavar="NAME", help="a model of the table, or a config.json"
    )
    asked.add_argument(
        "--hardware", required=True, metavar="NAME", help="hardware of the table, or a JSON file"
    )
    asked.add_argument(
        "--ttft-p99", required=True, type=float, metavar="S", help="seconds to the first token"
    )
    asked.add_argument(
        "--rate-scale", type=float, default=1.0, metavar="X", help="requests come X times as fast"
    )
    asked.add_argument(
        "--requests", type=int, metavar="N", help="the trace's first N requests (default: all)"
    )
    asked.add_argument(
        "--system", default="ours", metavar="NAME", help="a system of the table (default: ours)"
    )
    asked.add_argument(
        "--max-in-flight", type=int, metavar="N", help="requests that clients keep in flight at most"
    )
    asked.add_argument("--seed", type=int, default=0, help="of drawn workloads (default: 0)")
    asked.add_argument("--constants", type=Path, metavar="FILE", help="another table of constants")
    sizes = parser.add_argument_group("sizes, per device: 64GiB,128GiB,... ; 0 is none")
    sizes.add_argument(
        "--host", nargs="+", metavar="SIZE", help="default: parts of what the trace ever holds"
    )
    sizes.add_argument(
        "--disk", nargs="+", metavar="SIZE", help="default: the same; none if the hardware has none"
    )
    sizes.add_argument(
        "--device-memory", nargs="+", metavar="SIZE", help="weights included; default: the hardware's"
    )
    sizes.add_argument("--price-per-gib", action="append", default=[], metavar="TIER=PRICE", help="of device, host or "
        "disk; repeat it for each")  # fmt: skip
    sizes.add_argument("--resolution", type=float, default=0.1, metavar="X", help="refine until sizes that meet the "
        "target and sizes that do not are within this part of each other (default: 0.1)")  # fmt: skip
    sizes.add_argument(
        "--max-runs", type=int, default=80, metavar="N", help="refine in at most N runs (default: 80)"
    )
    shown = parser.add_argument_group("what is shown")
    shown.add_argument(
        "--json", metavar="FILE", help="everything as JSON; - is standard output, and nothing else"
    )
    shown.add_argument("--markdown", action="store_true", help="the table in Markdown")
    shown.add_argument(
        "--plot", type=Path, metavar="FILE", help="cost against P99 TTFT as .png, .svg or .pdf"
    )
    shown.add_argument(
        "--workers", type=int, default=2, metavar="N", help="simulations side by side (default: 2)"
    )
    return parser


def question_of(options: argparse.Namespace) -> Question:
    """The question that the flags ask. Raises ConfigError."""
    for flag, value in (("--workers", options.workers), ("--max-runs", options.max_runs)):
        if value < 1:
            raise ConfigError(f"{flag} {value} is less than 1; give 1 or more")
    if options.max_in_flight is not None and options.max_in_flight < 1:
        raise ConfigError(f"--max-in-flight {options.max_in_flight} is less than 1; give 1 or more")
    if options.plot is not None:
        check_plot(options.plot)
    check_json_path(options.json)
    constants = table(options.constants)
    workload = workload_file(options.trace, "--trace")
    if options.requests is not None:
        workload = first_requests(workload, options.requests)
    constants["workloads"] = {_TRACE: faster(workload, options.rate_scale)}
    hardware = named(constants, "hardware", "hardware", options.hardware)
    model = named(constants, "models", "model", options.model)
    system = named(constants, "systems", "system", options.system)
    overrides: dict[str, Any] = {"seed": options.seed}
    if options.max_in_flight is not None:
        overrides["max_in_flight"] = options.max_in_flight
    config = configure(hardware, model, system, _TRACE, overrides, constants)
    return Question(
        config,
        options.ttft_p99,
        prices_of(options.price_per_gib, int(config.get("tensor_parallel", 1))),
        None
        if options.device_memory is None
        else sizes_of("--device-memory", options.device_memory, 1 << 20),
        None if options.host is None else sizes_of("--host", options.host),
        None if options.disk is None else sizes_of("--disk", options.disk),
        options.resolution,
        options.max_runs,
    )


def main(arguments: Sequence[str] | None = None, program: str = "strata plan") -> int:
    """Runs the command. Returns its exit code."""
    options = parser_of(program).parse_args(arguments)
    try:
        question = question_of(options)
        began = time.monotonic()
        found = plan(question, partial(simulate_many, workers=options.workers), options.workers, _tell)
        result = {"manifest": _manifest(options, question, time.monotonic() - began), **found.as_json()}
        _write(options, found, result)
    except StrataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0 if found.best is not None else UNMET


def _tell(done: int, planned: int) -> None:
    if sys.stderr.isatty():
        print(
            f"\r{done} of {planned} sizes simulated",
            end="\n" if done == planned else "",
            file=sys.stderr,
            flush=True,
        )


def _manifest(options: argparse.Namespace, question: Question, seconds: float) -> dict[str, Any]:
    return {
        "program": "strata plan",
        "version": strata.__version__,
        "trace": options.trace.name,
        "requests": options.requests,
        "rate_scale": options.rate_scale,
        "model": options.model,
        "hardware": question.config["hardware"]["name"],
        "system": options.system,
        "max_in_flight": question.config["max_in_flight"],
        "seed": options.seed,
        "wall_s": round(seconds, 1),
    }


def _write(options: argparse.Namespace, found: Plan, result: Mapping[str, Any]) -> None:
    if options.plot is not None:
        draw(found, f"{result['manifest']['trace']}: {options.model} on {options.hardware}", options.plot)
    if options.json is not None:
        text = json.dumps(result, indent=1) + "\n"
        if options.json == "-":
            sys.stdout.write(text)
            return
        try:
            Path(options.json).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"--json {options.json} cannot be written: {error}; give another file"
            ) from error
    if options.markdown:
        sys.stdout.write(markdown(found))
    else:
        show(Console(), found)


if __name__ == "__main__":
    sys.exit(main())
