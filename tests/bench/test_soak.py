"""Many clients of which some leave: nothing is left behind, and nobody is told anything but the truth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from strata.bench import soak_command
from strata.bench.soak import Look, growth

MEMORY = "memory gained in the second half"


def run(folder: Path, tmp_path: Path, *flags: str) -> dict[str, Any]:
    target = tmp_path / "result.json"
    tiers = ["--device-memory", "8MiB", "--host-memory", "8MiB", "--disk-capacity", "64MiB"]
    few = ["--max-running", "16", "--max-waiting", "16", "--page-size", "16", "--tokens", "200"]
    code = soak_command.main(
        [
            "--model",
            str(folder),
            *tiers,
            *few,
            "--disk-path",
            str(tmp_path / "kv"),
            "--json",
            str(target),
            *flags,
        ]
    )
    result: dict[str, Any] = json.loads(target.read_text(encoding="utf-8"))
    assert code == (0 if all(bound["holds"] for bound in result["bounds"]) else 1)
    return result


def check(result: dict[str, Any]) -> None:
    assert result["failures"] == {}
    assert set(result["outcomes"]) == {"whole", "left", "told to come again"}, "each must have happened"
    assert result["cached_tokens"] > result["prompt_tokens"] / 2
    assert result["stats"]["aborted"] > 0
    broken = [bound for bound in result["bounds"] if not bound["holds"] and bound["name"] != MEMORY]
    assert broken == []


def test_seconds_of_it(folder: Path, tmp_path: Path) -> None:
    # Few documents: however few requests these seconds suffice for, most of them find theirs.
    check(run(folder, tmp_path, "--clients", "48", "--seconds", "5", "--documents", "4"))


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_ten_minutes_of_it(folder: Path, tmp_path: Path) -> None:
    result = run(folder, tmp_path)
    check(result)
    assert all(bound["holds"] for bound in result["bounds"])


def test_growth_is_between_the_second_and_the_last_quarter() -> None:
    looks = [Look(float(number), number if number < 25 else 100, 1, 1) for number in range(100)]
    assert growth(looks) == 0
    assert growth([*looks[:75], *(Look(0.0, 130, 1, 1) for _ in range(25))]) == 30
