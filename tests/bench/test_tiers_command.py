"""The whole measurement on a tiny model: every part, one JSON object, bounds that follow from the numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_bench import tiny_served

from strata.bench import tiers, tiers_command
from strata.errors import ConfigError

FLAGS = ["--tokens", "200", "--pairs", "2", "--streams", "2", "--prompt-tokens", "40", "--new-tokens", "40"]


@pytest.fixture(autouse=True)
def small_tiers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiers that fit the tiny model."""
    monkeypatch.setattr(tiers, "DEVICE_MEMORY", 1 << 20)
    monkeypatch.setattr(tiers, "CYCLE_HOST_MEMORY", 512 << 10)
    monkeypatch.setattr(tiers, "DISK_CAPACITY", 64 << 20)


def test_every_part_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*FLAGS, "--disk-path", str(tmp_path / "kv"), "--json", "-"]
    assert tiers_command.main(arguments, load=tiny_served) == 0
    result = json.loads(capsys.readouterr().out)
    assert [disk["bytes_per_s"] for disk in result["slow_disk"]] == [5_000_000, 50_000_000]
    for disk in result["slow_disk"]:
        assert len(disk["pairs"]) == 2
        assert all(pair["tokens_equal"] and pair["ratio"] > 0 for pair in disk["pairs"])
        # 12 whole pages before the last token, each from disk or counted as computed instead.
        assert all(pair["disk_tokens"] + pair["recomputed_tokens"] == 192 for pair in disk["pairs"])
    assert result["cycle"][0]["computed"] == 14 * 200, "round 1 computes all"
    assert len(result["cycle"]) == 3
    assert all(each["backup_pages"] > 0 and each["spill_pages"] > 0 for each in result["decode"])
    assert all(set(each["beside"]) == {"0", "10"} for each in result["beside_copies"])
    bounds = {bound["name"]: bound for bound in result["bounds"]}
    assert {"documents in turn", "decode", "disk of 5 MB/s", "disk of 50 MB/s"} <= bounds.keys()
    assert bounds["documents in turn"]["value"] == pytest.approx(1 - result["cycle"][2]["hit_share"])


def test_a_part_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'fast-disk' is no part"):
        tiers_command.main(["--parts", "fast-disk"], load=tiny_served)
