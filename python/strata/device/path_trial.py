"""Measures at the start how transfers go best on this machine: each way, at a few sizes, by each path. Nothing is
served yet, so that a page may be moved anywhere; all of it is over within about half a second of the first transfers.
"""

from __future__ import annotations

import itertools
import logging
import time
from dataclasses import replace

import numpy as np

from strata.device.cuda_runtime import CudaRuntime, DeviceError, Event, Stream
from strata.device.edge import Edge, PagePairs, Work
from strata.device.page_tables import PageTables
from strata.device.path_choice import DIRECTIONS, Direction, Measurement, Path, PathChoice, choose

_log = logging.getLogger("strata.device")

PAGES = (1, 16, 128)
BLOCKS = (1, 2, 4, 8)
ROUNDS = 3
"""The quickest of so many counts."""
MOST_BYTES = 64 << 20
LIMIT_S = 0.5
"""After this no further size is begun; what was measured counts. The device's first transfer each way comes before: a
driver may set up memory and kernels only then, however long that takes."""
SILENCE_S = 5.0
"""A transfer that takes longer will never end."""


def measure_paths(runtime: CudaRuntime, edge: Edge, tables: PageTables, stream: Stream) -> PathChoice:
    """The best paths. Raises DeviceError if the device does not do what it must."""
    paths = [Path("kernel", blocks) for blocks in BLOCKS]
    paths += [Path("batch")] if runtime.has_batched_copies else []
    ways: dict[Direction, list[Path]] = {
        "load": paths + [replace(path, whole=True) for path in paths],
        "backup": paths,
    }
    most = min(edge.device_pages, edge.host_pages, MOST_BYTES // edge.page_bytes)
    sizes = [pages for pages in PAGES if pages <= most]
    measurements: list[Measurement] = []
    event = runtime.create_event()
    try:
        for direction in DIRECTIONS if sizes else ():
            trial = _Trial(runtime, edge, tables, stream, event, direction, sizes[0])
            for path in ways[direction][:: len(paths)]:
                trial.run(path)
        deadline = time.monotonic() + LIMIT_S
        for pages, direction in itertools.product(sizes, DIRECTIONS):
            if measurements and time.monotonic() > deadline:
                break
            trial = _Trial(runtime, edge, tables, stream, event, direction, pages)
            measurements += trial.measure(ways[direction])
    except DeviceError as error:
        if not error.fatal:
            runtime.destroy_event(event)
        raise
    runtime.destroy_event(event)
    return choose(measurements, edge.layers)


class _Trial:
    """Transfers of one size in one direction."""

    def __init__(
        self,
        runtime: CudaRuntime,
        edge: Edge,
        tables: PageTables,
        stream: Stream,
        event: Event,
        direction: Direction,
        pages: int,
    ) -> None:
        self._runtime, self._edge, self._tables = runtime, edge, tables
        self._stream, self._event = stream, event
        self._direction, self._pages = direction, pages
        # Apart from each other and in opposite order, as after long use.
        index = np.arange(pages, dtype=np.uint32)
        self._pairs = PagePairs(
            index[::-1] * np.uint32(edge.device_pages // pages), index * np.uint32(edge.host_pages // pages)
        )

    def measure(self, paths: list[Path]) -> list[Measurement]:
        found: list[Measurement] = []
        refused = False
        for path in paths:
            if refused and path.kind == "batch":
                continue
            try:
                seconds = min(self.run(path) for _ in range(ROUNDS))
            except DeviceError as error:
                if path.kind == "kernel" or error.fatal:
                    raise
                self._runtime.clear_sticky_error()
                refused = True
                _log.warning("batched copies are not used: %s", error)
                continue
            found.append(Measurement(self._direction, self._pages, path, seconds))
        return found

    def run(self, path: Path) -> float:
        """Seconds of one transfer, from its first command until it was seen complete."""
        work = Work(self._runtime, self._edge, self._direction, self._pairs, path)
        table = self._tables.take(self._pages)
        try:
            began = self._runtime.now()
            work.begin(table, self._stream)
            for command in range(work.commands):
                work.queue(command, self._stream)
            self._runtime.record(self._event, self._stream)
            self._wait()
            return self._runtime.now() - began
        finally:
            self._tables.release(table)

    def _wait(self) -> None:
        deadline = time.monotonic() + SILENCE_S
        while not self._runtime.query(self._event):
            if time.monotonic() > deadline:
                what = f"a {self._direction} of {self._pages} pages"
                raise DeviceError(f"{what} did not end in {SILENCE_S:g} s", fatal=True)
