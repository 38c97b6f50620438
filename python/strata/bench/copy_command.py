"""`bench copy`: the copy engine between a page-first and a layer-first pool, beside a memcpy of the same bytes.

Both sides use as many threads, the same memories and the same direction; pools are warm and far larger than the
caches. Rounds take turns; a ratio is that of medians, against the faster of two memcpys: one with non-temporal
stores, one the C library's. Pages in order are what the pools' allocators hand out; scattered ones are the worst
that long use makes of them, and are reported without a bound.
"""

from __future__ import annotations

import argparse
import itertools
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
from rich.table import Table

from strata._core import CopyYardstick
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

PIECES = (2 << 10, 4 << 10, 32 << 10, 64 << 10)
THREADS = (1, 2)
KINDS = ("load", "backup")
LEAST_RATIO = {2 << 10: 0.7, 4 << 10: 0.85, 32 << 10: 0.85, 64 << 10: 0.85}
"""With two threads and pages in order."""
BESIDE_PIECE = 4 << 10
BESIDE_NICENESS = 10
BESIDE_SECONDS = 0.3
COMPUTE = ("arithmetic in cache", "reads of memory")
"""What runs beside saturating backups: the two things that decoding is made of."""


def measure_case(
    piece: int, threads: int, scattered: bool, pool_bytes: int, pairs: int
) -> list[dict[str, Any]]:
    """A row for each direction: GB/s of the engine and of both memcpys, and the ratio."""
    yardstick = CopyYardstick(piece, pool_bytes, threads, scattered=scattered)
    rows = []
    for kind in KINDS:
        works: tuple[Callable[[], float], ...] = (
            partial(yardstick.transfer, kind),
            partial(yardstick.memcpy, kind, True),
            partial(yardstick.memcpy, kind, False),
        )
        spans: list[list[float]] = [[], [], []]
        for turn in range(1 + pairs):
            for work, found in zip(works, spans, strict=True):
                seconds = work()
                if turn:  # the first turn warms up
                    found.append(seconds)
        engine, streaming, library = (yardstick.bytes / median(found) / 1e9 for found in spans)
        rows.append(
            {
                "piece_bytes": piece,
                "threads": threads,
                "pages": "scattered" if scattered else "in order",
                "kind": kind,
                "bytes": yardstick.bytes,
                "engine_gbps": engine,
                "streaming_memcpy_gbps": streaming,
                "library_memcpy_gbps": library,
                "ratio": engine / max(streaming, library),
                "ratio_to_streaming": engine / streaming,
            }
        )
    return rows


def measure_beside(pool_bytes: int, pairs: int) -> list[dict[str, Any]]:
    """How much of its speed computing on every core keeps while one copy thread backs up without a pause, at equal
    priority and with a niceness of `BESIDE_NICENESS`.
    """
    polite = CopyYardstick(BESIDE_PIECE, pool_bytes, 1, backup_niceness=BESIDE_NICENESS)
    equal = CopyYardstick(BESIDE_PIECE, pool_bytes, 1)
    rows = []
    for what in COMPUTE:
        rates: dict[str, list[float]] = {"alone": [], "equal": [], "nice": []}
        copied: dict[str, list[float]] = {"equal": [], "nice": []}
        for _ in range(pairs):
            rates["alone"].append(_compute(what))
            for name, yardstick in (("equal", equal), ("nice", polite)):
                rate, gbps = _compute_beside(what, yardstick)
                rates[name].append(rate)
                copied[name].append(gbps)
        alone = median(rates["alone"])
        rows.append(
            {
                "compute": what,
                "kept_at_equal_priority": median(rates["equal"]) / alone,
                "kept_with_niceness": median(rates["nice"]) / alone,
                "backup_gbps_at_equal_priority": median(copied["equal"]),
                "backup_gbps_with_niceness": median(copied["nice"]),
                "niceness": BESIDE_NICENESS,
            }
        )
    return rows


def _compute_beside(what: str, yardstick: CopyYardstick) -> tuple[float, float]:
    """(computed rounds a second, GB/s of the backups beside them)."""
    stop = threading.Event()
    spans: list[float] = []

    def back_up() -> None:
        while not stop.is_set():
            spans.append(yardstick.transfer("backup"))

    copier = threading.Thread(target=back_up)
    copier.start()
    try:
        rate = _compute(what)
    finally:
        stop.set()
        copier.join()
    return rate, len(spans) * yardstick.bytes / sum(spans) / 1e9


def _compute(what: str) -> float:
    """Rounds a second of all usable cores together, over about `BESIDE_SECONDS`."""
    cores = len(os.sched_getaffinity(0))

    def work(_core: int) -> float:
        values = np.ones(4096 if what == COMPUTE[0] else 2 << 20)
        out = np.empty_like(values[:4096])
        rounds, start = 0, time.perf_counter()
        end = start + BESIDE_SECONDS
        while (now := time.perf_counter()) < end:
            if what == COMPUTE[0]:
                np.sin(values, out=out)
            else:
                values.sum()
            rounds += 1
        return rounds / (now - start)

    with ThreadPoolExecutor(cores) as pool:
        return sum(pool.map(work, range(cores)))


def bounds_of(rows: Sequence[dict[str, Any]]) -> list[Bound]:
    """Two threads, pages in order: at most this many times as slow as a memcpy."""
    return [
        Bound(
            f"{row['kind']}, {row['piece_bytes'] >> 10} KiB pieces, 2 threads",
            1 / row["ratio"],
            1 / LEAST_RATIO[row["piece_bytes"]],
            "x",
            f"engine / memcpy at least {LEAST_RATIO[row['piece_bytes']]}: time x 1/{LEAST_RATIO[row['piece_bytes']]}",
        )
        for row in rows
        if row["threads"] == 2 and row["pages"] == "in order"
    ]


def parser_of(program: str) -> argparse.ArgumentParser:
    """The flags of this measurement."""
    parser = argparse.ArgumentParser(
        prog=program,
        allow_abbrev=False,
        description="The copy engine between page-first and layer-first pools, beside a memcpy of the same bytes.",
    )
    parser.add_argument("--pairs", type=int, default=9, help="rounds that take turns (default: 9)")
    parser.add_argument(
        "--pool-mib", type=int, default=256, help="size of each of the two pools in MiB (default: 256)"
    )
    parser.add_argument("--json", metavar="FILE", help=JSON_HELP)
    return parser


def main(arguments: Sequence[str], program: str = "python -m strata.bench copy") -> int:
    """Measures and reports. Returns 0; raises StrataError."""
    options = parser_of(program).parse_args(arguments)
    check_least(options, (("pairs", 1), ("pool_mib", 8)))
    check_json_path(options.json)
    facts = manifest(program, None, arguments=list(arguments), pairs=options.pairs, pool_mib=options.pool_mib)
    result = {**measure(options.pool_mib << 20, options.pairs), "manifest": facts}
    emit(result, _tables(result), options.json)
    return 0


def measure(pool_bytes: int, pairs: int) -> dict[str, Any]:
    """All rows and bounds, with a progress bar."""
    cases = list(itertools.product(PIECES, THREADS, (False, True)))
    rows: list[dict[str, Any]] = []
    with progress_steps(len(cases) + 1) as steps:
        for piece, threads, scattered in cases:
            _name_step(steps, piece, threads, scattered)
            rows += measure_case(piece, threads, scattered, pool_bytes, pairs)
        steps.next("computing beside backups")
        beside = measure_beside(pool_bytes, pairs)
    return {"rows": rows, "beside": beside, "bounds": [bound.as_json() for bound in bounds_of(rows)]}


def _name_step(steps: Steps, piece: int, threads: int, scattered: bool) -> None:
    pages = "scattered" if scattered else "in order"
    steps.next(f"{piece >> 10} KiB, {threads} thread{'s' if threads > 1 else ''}, {pages}")


def _tables(result: dict[str, Any]) -> list[Table]:
    numbers = ("engine_gbps", "streaming_memcpy_gbps", "library_memcpy_gbps", "ratio", "ratio_to_streaming")
    rows = [
        (
            f"{row['kind']}, {row['piece_bytes'] >> 10} KiB, {row['threads']}t, {row['pages']}",
            *(f"{row[name]:.2f}" for name in numbers),
        )
        for row in result["rows"]
    ]
    beside = [
        (
            row["compute"],
            f"{row['kept_at_equal_priority']:.2f}",
            f"{row['kept_with_niceness']:.2f}",
            f"{row['backup_gbps_at_equal_priority']:.2f}",
            f"{row['backup_gbps_with_niceness']:.2f}",
        )
        for row in result["beside"]
    ]
    columns = ("what", "engine", "non-temporal", "C library", "ratio to faster", "to non-temporal")
    return [
        table_of("GB/s, medians", columns, rows),
        table_of(
            f"speed kept beside one thread of backups (niceness 0 and {BESIDE_NICENESS}), their GB/s",
            ("computing", "kept", "kept, nice", "backup", "backup, nice"),
            beside,
        ),
        bounds_table(bounds_of(result["rows"])),
    ]
