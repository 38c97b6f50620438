"""How results are told: progress on stderr, a table, and with `--json -` exactly one JSON object on
stdout.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from strata.errors import ConfigError

STANDARD_OUTPUT = "-"
JSON_HELP = (
    "write the result as one JSON object to FILE; - is standard output, and the table goes to stderr then"
)


@dataclass(frozen=True)
class Bound:
    """A promise: `value` is to be at most `most`, both in `unit`. `rule` says how `most` comes about."""

    name: str
    value: float
    most: float
    unit: str
    rule: str

    @property
    def holds(self) -> bool:
        """Whether the promise was kept in this run."""
        return self.value <= self.most

    def as_json(self) -> dict[str, Any]:
        """The bound with its verdict."""
        return {
            "name": self.name,
            "value": self.value,
            "bound": self.most,
            "unit": self.unit,
            "rule": self.rule,
            "holds": self.holds,
        }


def median(values: Sequence[float]) -> float:
    """The median of at least one value."""
    return float(statistics.median(values))


class Steps:
    """A progress bar over the steps of a measurement; `next` names the step that begins."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress = progress
        self._task = progress.add_task("starting", total=total)
        self._begun = False

    def next(self, what: str) -> None:
        """The step before is done, `what` begins."""
        self._progress.update(self._task, description=what, advance=1 if self._begun else 0)
        self._begun = True

    def finish(self) -> None:
        """The last step is done."""
        self._progress.update(self._task, description="done", advance=1)


@contextmanager
def progress_steps(total: int) -> Iterator[Steps]:
    """A bar of `total` steps on stderr."""
    columns = (
        TextColumn("{task.description:<34}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        steps = Steps(progress, total)
        yield steps
        steps.finish()


def table_of(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table whose first column is text and whose others are numbers."""
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def bounds_table(bounds: Sequence[Bound]) -> Table:
    """Every bound beside its value."""
    rows = [
        (
            bound.name,
            f"{bound.value:.4g} {bound.unit}",
            f"{bound.most:.4g} {bound.unit}",
            "yes" if bound.holds else "NO",
            bound.rule,
        )
        for bound in bounds
    ]
    return table_of("bounds", ("what", "value", "at most", "holds", "rule"), rows)


def check_json_path(where: str | None) -> None:
    """Raises ConfigError if `--json` names a file that cannot come about: before the work, not after it."""
    if where and where != STANDARD_OUTPUT and not Path(where).expanduser().absolute().parent.is_dir():
        raise ConfigError(
            f"--json {where}: its folder does not exist; make it, or give - for standard output"
        )


def emit(result: dict[str, Any], tables: Sequence[Table], where: str | None) -> None:
    """Shows the tables and writes the JSON object to `where` (`--json`), if that was asked for."""
    Console(stderr=where == STANDARD_OUTPUT).print(*tables, sep="\n")
    if where is None:
        return
    text = json.dumps(result, indent=2) + "\n"
    if where == STANDARD_OUTPUT:
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    try:
        Path(where).expanduser().write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json {where} cannot be written: {error}; give another file, or -") from error
