"""What `strata inspect` and `strata purge` share: naming a root, and showing what lies in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from strata.config import format_size

SHOWN_DIGITS = 12
"""Digits of a fingerprint in a table; `--json` has all 64."""


def owner_text(found: dict[str, Any]) -> str:
    """Who uses the root, in words; empty if nobody does."""
    if not found["in_use"]:
        return ""
    return "another process" if found["owner"] is None else f"process {found['owner']}"


def show(console: Console, root: Path, found: dict[str, Any], *, verified: bool) -> None:
    """Prints what `_core.disk_inspect` found as a table, a row for each fingerprint."""
    owner = owner_text(found)
    console.print(
        f"{root}: {format_size(found['bytes'])} on disk, {f'in use by {owner}' if owner else 'not in use'}"
    )
    if not found["fingerprints"]:
        console.print("It holds no records.")
        return
    table = Table(box=SIMPLE_HEAD, padding=(0, 1))
    table.add_column("fingerprint", no_wrap=True)
    for name in ("page", "segments", "records", "free", "damaged", "on disk"):
        table.add_column(name, justify="right")
    for folder in found["fingerprints"]:
        counts = [folder["segments"], folder["whole"], folder["blank"], folder["damaged"]]
        page = f"{folder['page_size']} x {format_size(folder['page_bytes'] // max(folder['page_size'], 1))}"
        cells = [page, *map(str, counts), format_size(folder["bytes"])]
        table.add_row(folder["fingerprint"][:SHOWN_DIGITS], *cells)
    console.print(table)
    console.print("A page is so many tokens x bytes of a token.")
    for folder in found["fingerprints"]:
        name = folder["fingerprint"][:SHOWN_DIGITS]
        # Below the table, which fits a terminal of 80 columns.
        if verified:
            console.print(
                f"{name}: {folder['verified']:,} payloads have their checksum, {folder['corrupt']:,} do not"
            )
        if folder["damaged_segments"]:
            console.print(f"{name}: {folder['damaged_segments']} more segments cannot be read")


def show_foreign(console: Console, paths: list[Any], words: str) -> None:
    """Names what in a root is not Strata's."""
    for path in paths:
        console.print(f"{words}: {path}", markup=False, soft_wrap=True)
