"""The disk bench: what it promises to report, on a small file, and what it says where it cannot measure."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from strata._core import DiskMeter
from strata.bench import disk_command, fio
from strata.bench.disk_command import Case, bounds_of
from strata.errors import ConfigError, RequestError, StorageError

needs_fio = pytest.mark.skipif(
    shutil.which("fio") is None, reason="fio is not installed; only the bench needs it"
)


@needs_fio
def test_json_has_a_row_for_each_slot_order_and_direction(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--dir", str(tmp_path), "--mebibytes", "8", "--pairs", "1", "--depth", "4", "--json", "-"]
    assert disk_command.main(given) == 0
    shown = capsys.readouterr()
    result = json.loads(shown.out)
    found = {(row["slot_bytes"], row["order"], row["direction"]): row for row in result["rows"]}
    assert set(found) == {
        (slot, order, direction)
        for slot in (64 << 10, 1 << 20)
        for order in ("adjacent", "scattered")
        for direction in ("read", "write")
    }
    for row in found.values():
        assert row["ratio"] == pytest.approx(row["store_mbps"] / row["fio_mbps"])
        assert len(row["store_mbps_each"]) == len(row["fio_mbps_each"]) == 1
    assert [bound["bound"] for bound in result["bounds"]] == pytest.approx([1 / 0.9, 1 / 0.95] * 2)
    assert result["manifest"]["fio"].startswith("fio-")
    assert "MB/s, medians" in shown.err
    assert list(tmp_path.iterdir()) == [], "nothing is left"


def test_bounds_are_those_of_adjacent_pages() -> None:
    row = {"slot_bytes": 65_536, "order": "adjacent", "direction": "read", "ratio": 0.94}
    kept = bounds_of([row, {**row, "order": "scattered"}, {**row, "direction": "write"}])
    assert [(bound.name, bound.holds) for bound in kept] == [
        ("read of 64 KiB slots", False),
        ("write of 64 KiB slots", True),
    ]


@pytest.mark.parametrize("engine", ["auto", "threads"])
def test_the_meter_moves_pages_in_any_order_through_the_store(tmp_path: Path, engine: str) -> None:
    meter = DiskMeter(tmp_path, 65_536, 300, engine, 8, 2)
    assert meter.describe().startswith(("io_uring, depth 8", "threads x2"))
    order = np.random.default_rng(1).permutation(300).astype(np.uint32)
    with pytest.raises(StorageError, match=r"has no header|is missing"):
        meter.read(order)
    assert meter.write(order) > 0
    assert meter.read(order) > 0
    with pytest.raises(RequestError, match="no page 300 of 300"):
        meter.read(np.array([300], dtype=np.uint32))
    meter.close()


def test_unknown_engines_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--disk-engine .*choose auto, io_uring or threads"):
        DiskMeter(tmp_path, 65_536, 4, "aio", 8, 2)


def test_what_cannot_be_measured_is_said_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fio.shutil, "which", lambda _: None)
    with pytest.raises(ConfigError, match="no fio on the PATH: install it"):
        disk_command.main(["--dir", str(tmp_path)])
    monkeypatch.setattr(disk_command, "check_fio", lambda: "fio-0")
    with pytest.raises(ConfigError, match="is no folder"):
        disk_command.main(["--dir", str(tmp_path / "missing")])
    with pytest.raises(ConfigError, match="lower --mebibytes"):
        disk_command.main(["--dir", str(tmp_path), "--mebibytes", str(1 << 40)])
    with pytest.raises(ConfigError, match="--depth 0 is too small"):
        disk_command.main(["--dir", str(tmp_path), "--depth", "0"])


def test_the_order_of_pages() -> None:
    generator = np.random.default_rng(0)
    adjacent, scattered = Case(65_536, "adjacent", "read"), Case(65_536, "scattered", "write")
    assert disk_command.order_of(adjacent, 5, generator).tolist() == [0, 1, 2, 3, 4]
    assert sorted(disk_command.order_of(scattered, 50, generator).tolist()) == list(range(50))
    assert (adjacent.fio_pattern, scattered.fio_pattern) == ("read", "randwrite")
    assert isinstance(disk_command._parser("disk").parse_args(["--dir", "."]), argparse.Namespace)
