"""Pages through the disk store's whole path beside fio; `python -m strata.bench disk` is the full measurement."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strata._core import DiskMeter
from strata.bench.fio import FioFile
from strata.bench.report import median

MEBIBYTES = 256
DEPTH = 32
THREADS = 4


@pytest.mark.skipif(
    shutil.which("fio") is None, reason="fio is not installed; it is what the store stands beside"
)
@pytest.mark.benchmark(group="disk")
@pytest.mark.parametrize("direction", ["write", "read"])
@pytest.mark.parametrize("slot_bytes", [64 << 10, 1 << 20])
def test_disk(benchmark: Any, tmp_path: Path, slot_bytes: int, direction: str) -> None:
    """The benchmark's time is the store's; the ratio of rates is in `extra_info`."""
    pages = (MEBIBYTES << 20) // slot_bytes
    order = np.arange(pages, dtype=np.uint32)
    store = DiskMeter(tmp_path / "store", slot_bytes, pages, "auto", DEPTH, THREADS)
    store.write(order)
    ring = "io_uring, depth" in store.describe()
    beside = (DEPTH, "io_uring") if ring else (THREADS, "psync")
    fio = FioFile(tmp_path, MEBIBYTES << 20, slot_bytes, *beside)
    move = store.write if direction == "write" else store.read
    rates: dict[str, list[float]] = {"store": [], "fio": []}
    benchmark.pedantic(
        lambda: rates["store"].append((MEBIBYTES << 20) / move(order)),
        setup=lambda: rates["fio"].append(fio.rate(direction)),
        rounds=7,
        warmup_rounds=1,
    )
    store.close()
    middle = {name: median(found[1:]) for name, found in rates.items()}
    benchmark.extra_info |= {f"{name}_mbps": rate / 1e6 for name, rate in middle.items()}
    benchmark.extra_info["store_over_fio"] = middle["store"] / middle["fio"]
    assert all(rate > 0 for rate in middle.values())
