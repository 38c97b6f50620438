"""`python -m strata.simulate`: one simulation by names, as a table, as JSON, and as a trace for Perfetto."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from strata.bench.report import JSON_HELP, check_json_path, emit, table_of
from strata.bench.settings import manifest
from strata.errors import ConfigError, StrataError
from strata.simulate import constants
from strata.simulate.figures import command as figures
from strata.simulate.report import Distribution, Report
from strata.simulate.run import at_rate, configure, simulate, simulate_traced

PROGRAM = "python -m strata.simulate"
CHOICES = {"hardware": "hardware", "model": "models", "system": "systems", "workload": "workloads"}
"""Flag -> section of the table of constants."""


def parser_of(program: str) -> argparse.ArgumentParser:
    """The command's flags."""
    parser = argparse.ArgumentParser(
        prog=program,
        allow_abbrev=False,
        description="Run Strata's scheduler and cache, or a peer's, on a machine that is not here.",
    )
    for flag, section in CHOICES.items():
        parser.add_argument(f"--{flag}", metavar="NAME", help=f"one of the {section} that --list shows")
    parser.add_argument(
        "--figure", metavar="N", help="draw a figure of the Strata paper; `--figure N --help` shows its flags"
    )
    parser.add_argument("--list", action="store_true", help="show the names in the table of constants")
    parser.add_argument("--rate", type=float, metavar="R", help="arrivals per second (default: all at once)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of everything random (default: 0)")
    parser.add_argument("--warm", action="store_true", help="start with the contexts in host memory")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change a field of the configuration, e.g. system.page_size=1; may be given again",
    )
    parser.add_argument("--constants", type=Path, metavar="FILE", help="a table of constants of your own")
    parser.add_argument("--json", metavar="FILE", help=JSON_HELP)
    parser.add_argument(
        "--perfetto", type=Path, metavar="FILE", help="write the timeline for ui.perfetto.dev"
    )
    return parser


def main(arguments: Sequence[str] | None = None, program: str = PROGRAM) -> int:
    """Runs the command. Returns its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if any(argument == "--figure" or argument.startswith("--figure=") for argument in given):
            return figures.main(given, program)
        options = parser_of(program).parse_args(given)
        return _list(options) if options.list else _simulate(options, program, given)
    except StrataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: no result", file=sys.stderr)
        return 130


def overrides_of(settings: Sequence[str]) -> dict[str, Any]:
    """`a.b=1` as `{"a": {"b": 1}}`: values are JSON where they can be, else text. Raises ConfigError."""
    whole: dict[str, Any] = {}
    for setting in settings:
        path, equals, text = setting.partition("=")
        *parents, last = path.split(".")
        if not equals or not all([*parents, last]):
            raise ConfigError(f"--set {setting!r} is no KEY=VALUE; write it like system.page_size=1")
        within = whole
        for parent in parents:
            within = within.setdefault(parent, {})
            if not isinstance(within, dict):
                raise ConfigError(f"--set {setting!r} goes into {parent!r}, which was set to a value before")
        within[last] = _value(text)
    return whole


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _list(options: argparse.Namespace) -> int:
    table = constants.table(options.constants)
    names = {section: constants.names(section, table) for section in CHOICES.values()}
    rows = [(f"--{flag}", ", ".join(names[section])) for flag, section in CHOICES.items()]
    emit(names, [table_of("names in the table of constants", ("flag", "names"), rows)], options.json)
    return 0


def _simulate(options: argparse.Namespace, program: str, arguments: Sequence[str]) -> int:
    config = _config(options)
    check_json_path(options.json)
    if options.perfetto and not options.perfetto.expanduser().absolute().parent.is_dir():
        raise ConfigError(f"--perfetto {options.perfetto}: its folder does not exist; make it")
    if options.perfetto is None:
        report = simulate(config)
    else:
        traced = simulate_traced(config)
        report = traced.report
        _write(options.perfetto, traced.timeline)
    facts = manifest(program, options.seed, arguments=list(arguments))
    emit({"report": report, "configuration": config, "manifest": facts}, tables_of(report), options.json)
    return 0


def _config(options: argparse.Namespace) -> dict[str, Any]:
    table = constants.table(options.constants)
    chosen = {flag: getattr(options, flag) for flag in CHOICES}
    for flag, section in CHOICES.items():
        known = constants.names(section, table)
        if chosen[flag] not in known:
            told = f"--{flag} is missing" if chosen[flag] is None else f"--{flag} {chosen[flag]!r} is unknown"
            raise ConfigError(f"{told}: choose {', '.join(known)}")
    overrides = {"seed": options.seed, "warm": options.warm, **overrides_of(options.set)}
    config = configure(**chosen, overrides=overrides, table=table)
    return config if options.rate is None else at_rate(config, options.rate)


def _write(where: Path, timeline: Mapping[str, Any]) -> None:
    try:
        where.expanduser().write_text(json.dumps(timeline), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--perfetto {where} cannot be written: {error}; give another file") from error


def tables_of(report: Report) -> list[Table]:
    """How long requests took, and what became of the device's time and of the prompts."""
    prompt = report["prompt_tokens"]
    tokens = {"device": prompt["device"], "host": prompt["host"], "disk": prompt["disk"]}
    whole = max(sum(tokens.values()) + prompt["computed"], 1)
    stalls = report["stalls"]
    refused = f" ({report['refused']:,} refused)" if report["refused"] else ""
    rows = [
        ("requests answered", f"{report['finished']:,}{refused}"),
        ("virtual time", f"{report['duration_s']:,.1f} s"),
        ("requests", f"{report['requests_per_s']:.3f} /s"),
        ("output tokens", f"{report['output_tokens_per_s']:,.1f} /s"),
        *((f"prompt tokens from {tier}", f"{count / whole:.1%}") for tier, count in tokens.items()),
        ("prompt tokens computed", f"{prompt['computed'] / whole:.1%}"),
        ("device computes", f"{report['device_busy_share']:.1%} of the time"),
        ("prefill waits for loads", f"{report['prefill_stall_share']:.1%} of prefill steps"),
        ("... within prefill steps", f"{stalls['prefill_load_s']:,.2f} s"),
        ("... within decode steps", f"{stalls['decode_load_s']:,.2f} s"),
        ("requests wait, none can go", f"{stalls['waiting_s']:,.2f} s"),
        ("no requests", f"{stalls['empty_s']:,.2f} s"),
    ]
    title = f"{report['system']} on {report['hardware']}, seed {report['seed']}: simulated"
    return [_times(report), table_of(title, ("what", "value"), rows)]


def _times(report: Report) -> Table:
    def row(name: str, times: Distribution) -> tuple[str, ...]:
        values = (times["mean"], times["p50"], times["p90"], times["p99"], times["max"])
        return (name, *(f"{value:,.3f}" for value in values))

    return table_of(
        "seconds",
        ("what", "mean", "p50", "p90", "p99", "max"),
        [
            row("time to first token", report["ttft"]),
            row("... from when the client was ready", report["ttft_from_due"]),
            row("time per output token", report["time_per_output_token"]),
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
