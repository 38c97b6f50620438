"""`bench copy`: its cases, bounds and refusals, on tiny pools."""

from __future__ import annotations

import json

import pytest

from strata._core import CopyYardstick
from strata.bench import copy_command
from strata.errors import ConfigError


def test_json_has_every_case_and_a_bound_for_two_threads(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_command, "BESIDE_SECONDS", 0.01)
    assert copy_command.main(["--pairs", "1", "--pool-mib", "8", "--json", "-"]) == 0
    shown = capsys.readouterr()
    result = json.loads(shown.out)
    cases = {(row["piece_bytes"], row["threads"], row["pages"], row["kind"]) for row in result["rows"]}
    assert len(cases) == len(result["rows"]) == 4 * 2 * 2 * 2
    for row in result["rows"]:
        faster = max(row["streaming_memcpy_gbps"], row["library_memcpy_gbps"])
        assert row["ratio"] == pytest.approx(row["engine_gbps"] / faster)
        assert 0 < row["bytes"] <= 8 << 20
    assert len(result["bounds"]) == 4 * 2
    assert {round(1 / bound["bound"], 2) for bound in result["bounds"]} == {0.7, 0.85}
    assert [row["compute"] for row in result["beside"]] == list(copy_command.COMPUTE)
    assert "GB/s" in shown.err


def test_refusals_name_the_flag() -> None:
    with pytest.raises(ConfigError, match="--pool-mib 1 is too small"):
        copy_command.main(["--pool-mib", "1"])
    with pytest.raises(ConfigError, match="load or backup"):
        CopyYardstick(2048, 1 << 20, 1).transfer("spill")
    with pytest.raises(ConfigError, match="--copy-threads must be between 1 and 16, got 17"):
        CopyYardstick(2048, 1 << 20, 17)
    with pytest.raises(ConfigError, match="backup_niceness"):
        CopyYardstick(2048, 1 << 20, 1, backup_niceness=20)
