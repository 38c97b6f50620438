"""Both comparisons on a tiny model: every pair is there, nobody is deferred, and bounds follow from the numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_bench import tiny_served

from strata.bench import scheduling, scheduling_command
from strata.errors import ConfigError, StorageError

FLAGS = ["--tokens", "200", "--pairs", "2", "--sharers", "6", "--question-tokens", "5", "--streams", "2"]


@pytest.fixture(autouse=True)
def small_tiers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiers that fit the tiny model."""
    monkeypatch.setattr(scheduling, "DEVICE_MEMORY", 1 << 20)


def test_both_parts_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*FLAGS, "--load-policy", "always", "--json", "-"]
    assert scheduling_command.main(arguments, load=tiny_served) == 0
    result = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in result["comparisons"]] == [
        "sharers",
        "host hit, link 380 MB/s",
        "host hit, link as fast as it goes",
    ]
    for each in result["comparisons"]:
        assert len(each["pairs"]) == 2
        for pair in each["pairs"]:
            assert pair["ratio"] == pytest.approx(pair["ours"]["ttft_s"] / pair["theirs"]["ttft_s"])
            assert pair["ratio"] > 0
    assert all(pair["ours"]["gap_s"] > 0 for pair in result["comparisons"][1]["pairs"])
    bounds = {bound["name"]: bound for bound in result["bounds"]}
    assert bounds.keys() == {
        "sharers: deferred",
        "sharers: TTFT",
        "host hit, 380 MB/s",
        "host hit, as fast as it goes",
    }
    assert bounds["sharers: deferred"]["value"] == 0 and bounds["sharers: deferred"]["holds"]
    assert bounds["sharers: TTFT"]["value"] == result["comparisons"][0]["ratio"]


def test_a_stream_that_ends_too_soon_is_an_error() -> None:
    arguments = [*FLAGS, "--parts", "host-hit", "--load-policy", "always", "--stream-tokens", "8"]
    arguments += ["--copy-bandwidth", "1MB"]
    with pytest.raises(StorageError, match="raise --stream-tokens"):
        scheduling_command.main(arguments, load=tiny_served)


def test_a_part_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="'luck' is no part"):
        scheduling_command.main(["--parts", "luck"], load=tiny_served)
