"""`python -m strata.simulate --figure N`: draws a figure of the paper and tells it as tables, JSON and a picture."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from strata.bench.load.plot import check_plot
from strata.bench.report import JSON_HELP, STANDARD_OUTPUT, check_json_path, emit
from strata.errors import ConfigError
from strata.simulate.constants import table
from strata.simulate.figures import plot
from strata.simulate.figures.registry import FIGURES, figure_of
from strata.simulate.figures.study import Study
from strata.simulate.figures.tables import heading, json_of, tables_of

PROGRAM = "python -m strata.simulate"


def parser_of(program: str = PROGRAM) -> argparse.ArgumentParser:
    """The flags of `--figure`."""
    parser = argparse.ArgumentParser(
        prog=f"{program} --figure N", description="A figure of the Strata paper from the simulator."
    )
    numbers = ", ".join(str(number) for number in FIGURES)
    parser.add_argument("--figure", type=_number, required=True, metavar="N", help=f"which: {numbers}")
    parser.add_argument(
        "--quick", action="store_true", help="few requests: a look at the form, not at the numbers"
    )
    parser.add_argument("--json", metavar="FILE", help=JSON_HELP)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write the picture: .png, .svg or .pdf")
    parser.add_argument(
        "--constants", type=Path, metavar="FILE", help="the table of constants (default: Strata's own)"
    )
    parser.add_argument(
        "--seeds", type=_seeds, default=(1,), metavar="1,2,..", help="a run for each (default: 1)"
    )
    parser.add_argument(
        "--processes", type=int, metavar="COUNT", help="simulations side by side (default: one a core)"
    )
    parser.add_argument(
        "--models", type=_names, metavar="A,B", help="figure 8, beyond, ideas: these models only"
    )
    parser.add_argument(
        "--workloads", type=_names, metavar="A,B", help="figure 8, beyond, ideas: these data sets only"
    )
    parser.add_argument(
        "--least-page",
        type=int,
        default=16,
        metavar="TOKENS",
        help="systems with smaller pages are simulated with this one; 1 takes them as they are, and several times "
        "as long (default: 16)",
    )
    return parser


def main(arguments: Sequence[str], program: str = PROGRAM) -> int:
    """Draws and reports. Returns 0; raises StrataError."""
    options = parser_of(program).parse_args(arguments)
    figure = figure_of(options.figure)
    _check(options)
    study = Study(
        table(options.constants),
        options.seeds,
        options.processes,
        options.quick,
        options.least_page,
        {"models": options.models, "workloads": options.workloads},
    )
    with Console(stderr=True).status(f"simulating figure {figure.number}"):
        drawing = figure.draw(study)
    title = heading(figure, study)
    console = Console(stderr=options.json == STANDARD_OUTPUT)
    console.print(title, style="bold")
    console.print(figure.caption)
    emit(json_of(figure, drawing, study), tables_of(drawing), options.json)
    for remark in drawing.remarks:
        console.print(remark)
    if options.plot is not None:
        plot.draw(drawing, title, figure.caption, options.plot)
    return 0


def _check(options: argparse.Namespace) -> None:
    check_json_path(options.json)
    if options.plot is not None:
        check_plot(options.plot)
    for flag in ("processes", "least_page"):
        value = getattr(options, flag)
        if value is not None and value < 1:
            raise ConfigError(f"--{flag.replace('_', '-')} {value} is too small; give at least 1")
    if (options.models or options.workloads) and not figure_of(options.figure).selectable:
        chosen = [str(number) for number, figure in FIGURES.items() if figure.selectable]
        raise ConfigError(
            f"--models and --workloads are for figure {', '.join(chosen)}; leave them out of figure {options.figure}"
        )


def _number(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _seeds(text: str) -> tuple[int, ...]:
    seeds = tuple(int(part) for part in text.split(","))
    if len(set(seeds)) < len(seeds) or min(seeds) < 0:
        raise argparse.ArgumentTypeError(f"{text} must be different numbers of at least 0, as in 1,2,3")
    return seeds


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
