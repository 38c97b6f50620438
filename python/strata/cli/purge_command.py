"""`strata purge ROOT`: deletes what Strata wrote into a disk root. Only a marked root that nobody uses, only
Strata's own files, and only after a yes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from strata._core import disk_inspect, disk_purge
from strata.cli.disk_report import owner_text, show, show_foreign
from strata.config import format_size
from strata.errors import StorageError, StrataError


def parser_of(program: str) -> argparse.ArgumentParser:
    """The command's flags."""
    parser = argparse.ArgumentParser(
        prog=program,
        description="Delete the records in a disk root, which hold users' text. What is not Strata's is left.",
        epilog="Exit code 0; 1 if nothing was deleted, since it is no disk root, in use, or the answer was no.",
    )
    parser.add_argument("root", type=Path, metavar="ROOT", help="the folder that --disk-path names")
    parser.add_argument(
        "--fingerprint", metavar="HEX", help="delete this model's records alone: the first digits are enough"
    )
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else; needs --yes")
    return parser


def check_idle(root: Path, found: dict[str, Any]) -> None:
    """Raises StorageError if a process uses the root; the purge itself checks again, under the lock."""
    if found["in_use"]:
        raise StorageError(f"disk root {root} is in use by {owner_text(found)}: stop that server first")


def is_agreed(root: Path, found: dict[str, Any], options: argparse.Namespace) -> bool:
    """Shows what would be deleted and asks. Raises StorageError if there is nobody to ask."""
    if not sys.stdin.isatty():
        raise StorageError(f"purging {root} needs a yes, and standard input is no terminal: pass --yes")
    show(Console(), root, found, verified=False)
    what = f"fingerprint {options.fingerprint} of {root}" if options.fingerprint else f"all of {root}"
    return input(f"Delete {what}? It cannot be undone. [y/N] ").strip().lower() in ("y", "yes")


def main(arguments: Sequence[str] | None = None, program: str = "strata purge") -> int:
    """Runs the command. Returns its exit code."""
    parser = parser_of(program)
    options = parser.parse_args(arguments)
    if options.json and not options.yes:
        parser.error("--json asks nothing: pass --yes with it")
    try:
        found = disk_inspect(options.root)
        check_idle(options.root, found)
        if not options.yes and not is_agreed(options.root, found, options):
            print("nothing was deleted", file=sys.stderr)
            return 1
        purged = disk_purge(options.root, fingerprint=options.fingerprint)
    except StrataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (EOFError, KeyboardInterrupt):
        print("\nnothing was deleted", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps({"root": str(options.root), **purged}, default=str))
        return 0
    console = Console()
    console.print(f"deleted {purged['files']} files, {format_size(purged['bytes'])}")
    show_foreign(console, purged["left"], "left, not Strata's")
    return 0


if __name__ == "__main__":
    sys.exit(main())
