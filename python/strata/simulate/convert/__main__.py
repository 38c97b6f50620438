"""`python -m strata.simulate.convert --format F INPUT... --output OUT.json`: a workload from a public data set."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from strata.errors import ConfigError, StrataError
from strata.simulate.convert import FORMATS, Conversion, convert, counter_of

_PROGRAM = "python -m strata.simulate.convert"


def parser_of(program: str) -> argparse.ArgumentParser:
    """The command's flags."""
    parser = argparse.ArgumentParser(
        prog=program,
        allow_abbrev=False,
        description="Turn a public data set into a workload for the simulator. The files are not downloaded; no text "
        "of theirs is kept, only lengths and what prompts share.",
        epilog="The result: python -m strata.simulate --workload OUT.json, or strata plan --trace OUT.json.",
    )
    parser.add_argument(
        "inputs", nargs="+", type=Path, metavar="INPUT", help="files; for narrativeqa also a folder"
    )
    parser.add_argument(
        "--format", required=True, choices=tuple(FORMATS), dest="form", help="what the files are"
    )
    parser.add_argument(
        "--output", required=True, type=Path, metavar="OUT.json", help="where the workload goes"
    )
    parser.add_argument(
        "--tokenizer", type=Path, metavar="FILE", help="a tokenizer.json, or a model's folder with one"
    )
    parser.add_argument(
        "--characters-per-token",
        type=float,
        metavar="N",
        help="an estimate, where no tokenizer is given (default: 4)",
    )
    parser.add_argument(
        "--order",
        choices=("shuffle", "minimum", "maximum"),
        default="shuffle",
        help="how many others come between two questions about a context (default: shuffle)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the order (default: 0)")
    parser.add_argument("--most-contexts", type=int, metavar="N", help="documents or conversations at most")
    parser.add_argument("--most-requests", type=int, metavar="N", help="requests at most")
    parser.add_argument(
        "--think-time",
        type=float,
        metavar="S",
        help="seconds between an answer and the next question (default: 60 for sharegpt, 0 for reviewmt)",
    )
    parser.add_argument(
        "--time-scale",
        type=float,
        default=1.0,
        metavar="X",
        help="a trace's arrivals lie X times as far apart",
    )
    parser.add_argument(
        "--split", metavar="NAME", help="train, valid or test: one part of NarrativeQA's folder"
    )
    return parser


def main(arguments: Sequence[str] | None = None, program: str = _PROGRAM) -> int:
    """Runs the command. Returns its exit code."""
    options = parser_of(program).parse_args(arguments)
    try:
        conversion = Conversion(
            counter_of(options.tokenizer, options.characters_per_token),
            options.order,
            options.seed,
            options.most_contexts,
            options.most_requests,
            options.think_time,
            options.time_scale,
            options.split,
        )
        entry = convert(options.form, options.inputs, conversion)
        try:
            with options.output.open("w", encoding="utf-8") as file:
                json.dump(entry, file, separators=(",", ":"))
                file.write("\n")
        except OSError as error:
            raise ConfigError(
                f"--output {options.output} cannot be written: {error}; give another file"
            ) from error
    except StrataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps({"statistics": entry["statistics"], "notes": entry["notes"]}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
