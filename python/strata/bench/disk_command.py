"""The disk tier beside fio: pages read and written through the store's whole path (reserve, move, checksum,
commit), and a file of the same size in the same folder with the same block size, depth and order.

Store and fio take turns, A B A B; each number is a median, each verdict a ratio of medians.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from strata._core import DiskMeter
from strata.bench.fio import FioFile, check_fio
from strata.bench.report import (
    JSON_HELP,
    Bound,
    Steps,
    bounds_table,
    check_json_path,
    emit,
    median,
    progress_steps,
    table_of,
)
from strata.bench.settings import check_least, manifest
from strata.config.machine import disk_space
from strata.errors import ConfigError

SLOTS = (64 << 10, 1 << 20)
"""Page sizes in bytes."""
ORDERS = ("adjacent", "scattered")
"""Pages one after the other on disk, as documents are written, or in random order."""
LEAST_OF_FIO = {"read": 0.95, "write": 0.9}
ENGINES = ("auto", "io_uring", "threads")
NOTES = [
    "store: pages through submit, O_DIRECT, xxh3-128 of every page, headers and completion; adjacent pages of "
    "a transfer are merged into I/Os of up to 1 MiB; all blocks are written before",
    "fio: the same folder, bytes, block size, depth and order, O_DIRECT, preallocated, all blocks written before, "
    "memory in transparent huge pages like the host arena",
    "bounds are those of adjacent pages; scattered pages are reported",
]


@dataclass(frozen=True)
class Case:
    """What one row measures."""

    slot_bytes: int
    order: str
    direction: str

    @property
    def fio_pattern(self) -> str:
        """What fio calls it."""
        return self.direction if self.order == "adjacent" else f"rand{self.direction}"

    @property
    def name(self) -> str:
        """For tables."""
        return f"{self.direction}, {self.slot_bytes >> 10} KiB, {self.order}"


def order_of(case: Case, pages: int, generator: np.random.Generator) -> npt.NDArray[np.uint32]:
    """The pages in the order in which they are moved."""
    if case.order == "adjacent":
        return np.arange(pages, dtype=np.uint32)
    return generator.permutation(pages).astype(np.uint32)


def measure_slot(
    folder: Path, slot_bytes: int, options: argparse.Namespace, steps: Steps, generator: np.random.Generator
) -> tuple[list[dict[str, Any]], str]:
    """The rows of one slot size, and what the store's engine calls itself."""
    pages = options.mebibytes * (1 << 20) // slot_bytes
    store = DiskMeter(
        str(folder / f"store-{slot_bytes}"), slot_bytes, pages, options.engine, options.depth, options.threads
    )
    try:
        engine = store.describe()
        ioengine, depth = (
            ("io_uring", options.depth) if "io_uring, depth" in engine else ("psync", options.threads)
        )
        steps.next(f"{slot_bytes >> 10} KiB: writing every block")
        store.write(np.arange(pages, dtype=np.uint32))
        with tempfile.TemporaryDirectory(prefix="fio-", dir=folder) as beside:
            fio = FioFile(Path(beside), pages * slot_bytes, slot_bytes, depth, ioengine)
            cases = [Case(slot_bytes, order, way) for order in ORDERS for way in ("write", "read")]
            rows = []
            for case in cases:
                steps.next(case.name)
                rows.append(measure_case(case, store, fio, pages, options.pairs, generator))
        return rows, engine
    finally:
        store.close()


def measure_case(
    case: Case, store: DiskMeter, fio: FioFile, pages: int, pairs: int, generator: np.random.Generator
) -> dict[str, Any]:
    """One row: store and fio in turn, `pairs` times, after one unmeasured turn of each."""
    rates: dict[str, list[float]] = {"store": [], "fio": []}
    move = store.write if case.direction == "write" else store.read
    for turn in range(pairs + 1):
        seconds = move(order_of(case, pages, generator))
        fio_rate = fio.rate(case.fio_pattern)
        if turn > 0:
            rates["store"].append(pages * case.slot_bytes / seconds / 1e6)
            rates["fio"].append(fio_rate / 1e6)
    store_rate, fio_rate = median(rates["store"]), median(rates["fio"])
    return {
        "direction": case.direction,
        "slot_bytes": case.slot_bytes,
        "order": case.order,
        "store_mbps": store_rate,
        "fio_mbps": fio_rate,
        "ratio": store_rate / fio_rate,
        "store_mbps_each": rates["store"],
        "fio_mbps_each": rates["fio"],
    }


def bounds_of(rows: Sequence[dict[str, Any]]) -> list[Bound]:
    """How much longer than fio the store may take."""
    bounds: list[Bound] = []
    for row in rows:
        if row["order"] == "adjacent":
            least = LEAST_OF_FIO[row["direction"]]
            name = f"{row['direction']} of {row['slot_bytes'] >> 10} KiB slots"
            rule = f"at least {least} of fio's rate"
            bounds.append(Bound(name, 1 / row["ratio"], 1 / least, "x fio's time", rule))
    return bounds


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """All rows and bounds, with a progress bar."""
    generator = np.random.default_rng(options.seed)
    rows: list[dict[str, Any]] = []
    engine = ""
    with progress_steps(len(SLOTS) * (1 + 2 * len(ORDERS))) as steps:
        for slot_bytes in SLOTS:
            found, engine = measure_slot(folder, slot_bytes, options, steps, generator)
            rows.extend(found)
    return {
        "rows": rows,
        "engine": engine,
        "bounds": [bound.as_json() for bound in bounds_of(rows)],
        "notes": NOTES,
    }


def main(arguments: Sequence[str], program: str = "python -m strata.bench disk") -> int:
    """Measures and reports. Returns 0; raises StrataError."""
    options = _parser(program).parse_args(arguments)
    check_least(options, [("pairs", 1), ("mebibytes", 1), ("depth", 1), ("threads", 1)])
    check_json_path(options.json)
    fio_version = check_fio()
    folder = Path(options.dir).expanduser()
    needed = 3 * options.mebibytes << 20
    if not folder.is_dir():
        raise ConfigError(f"--dir {folder} is no folder: make it, or name one on the disk to be measured")
    if disk_space(folder) < needed:
        raise ConfigError(
            f"--dir {folder} has less than {needed:,} bytes left: free some, or lower --mebibytes"
        )
    facts = manifest(program, options.seed, arguments=list(arguments), fio=fio_version)
    with tempfile.TemporaryDirectory(prefix="strata-bench-", dir=folder) as inside:
        result = {**measure(Path(inside), options), "manifest": facts}
    emit(result, _tables(result), options.json)
    return 0


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program, allow_abbrev=False, description="The disk tier's reads and writes beside fio's."
    )
    add = parser.add_argument
    add(
        "--dir",
        required=True,
        help="folder on the disk to be measured; everything put there is removed again",
    )
    add("--engine", choices=ENGINES, default="auto", help="the store's I/O engine (default: auto)")
    add("--depth", type=int, default=32, help="I/Os in flight with io_uring (default: 32)")
    add("--threads", type=int, default=4, help="the store's I/O threads (default: 4)")
    add("--mebibytes", type=int, default=512, help="moved in each pass (default: 512)")
    add("--pairs", type=int, default=7, help="turns of store and fio; results are medians (default: 7)")
    add("--seed", type=int, default=0, help="of the random orders (default: 0)")
    add("--json", metavar="FILE", help=JSON_HELP)
    return parser


def _tables(result: dict[str, Any]) -> list[Any]:
    rows = [
        (
            Case(row["slot_bytes"], row["order"], row["direction"]).name,
            f"{row['store_mbps']:.0f}",
            f"{row['fio_mbps']:.0f}",
            f"{row['ratio']:.3f}",
        )
        for row in result["rows"]
    ]
    bounds = [
        Bound(bound["name"], bound["value"], bound["bound"], bound["unit"], bound["rule"])
        for bound in result["bounds"]
    ]
    return [
        table_of(f"MB/s, medians ({result['engine']})", ("what", "store", "fio", "ratio"), rows),
        bounds_table(bounds),
        *NOTES,
    ]
