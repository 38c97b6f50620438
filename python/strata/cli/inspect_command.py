"""`strata inspect ROOT`: what lies in a disk root, also while a server uses it. Reads only."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from strata._core import disk_inspect
from strata.cli.disk_report import show, show_foreign
from strata.errors import StrataError

CORRUPT = 3
"""The exit code if `--verify` found a payload without its checksum."""


def parser_of(program: str) -> argparse.ArgumentParser:
    """The command's flags."""
    parser = argparse.ArgumentParser(
        prog=program,
        description="Show what lies in a disk root. Reads only, takes no lock, and works beside a server.",
        epilog=f"Exit code 0; 1 if it is no disk root or cannot be read; {CORRUPT} if --verify finds a corrupt record.",
    )
    parser.add_argument("root", type=Path, metavar="ROOT", help="the folder that --disk-path names")
    parser.add_argument("--verify", action="store_true", help="read every payload and compare its checksum")
    parser.add_argument("--json", action="store_true", help="print JSON with every field and nothing else")
    return parser


def main(arguments: Sequence[str] | None = None, program: str = "strata inspect") -> int:
    """Runs the command. Returns its exit code."""
    options = parser_of(program).parse_args(arguments)
    try:
        found = disk_inspect(options.root, verify=options.verify)
    except StrataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps({"root": str(options.root), "verified": options.verify, **found}, default=str))
    else:
        console = Console()
        show(console, options.root, found, verified=options.verify)
        show_foreign(console, found["foreign"], "not Strata's")
        if found["in_use"]:
            console.print("In use: a record that is being written now may count as damaged.")
    return CORRUPT if any(folder["corrupt"] for folder in found["fingerprints"]) else 0


if __name__ == "__main__":
    sys.exit(main())
