"""Measurements of a model in a folder: `transformers` is the reference, and `--http` asks a real server process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_longdoc import PROMISED

from strata.bench import decode_command, longdoc_command


def test_longdoc_over_http(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", str(folder), "--disk-path", str(tmp_path / "kv"), "--device-memory", "4MiB"]
    sizes = ["--host-memory", "8MiB", "--disk-capacity", "64MiB", "--tokens", "400", "--pairs", "1"]
    assert longdoc_command.main([*flags, *sizes, "--http", "--json", "-"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert set(PROMISED) <= set(result)
    assert all(result[name] > 0 for name in PROMISED if name != "disk_gbps")
    assert result["disk_gbps"] is None, "it needs the counters of an engine in this process"
    assert result["tokens_equal"]
    assert result["manifest"]["transport"] == "HTTP"
    assert "transformers" in result["manifest"]["reference"]
    assert {bound["name"] for bound in result["bounds"]} == {"cold", "device hit", "host hit"}


def test_engine_and_transformers_decode_the_same_tokens(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--model", str(folder), "--dtype", "float64", "--device-memory", "4MiB", "--host-memory", "0"]
    sizes = ["--disk-capacity", "0", "--streams", "3", "--prompt-tokens", "20", "--new-tokens", "6"]
    assert decode_command.main([*flags, *sizes, "--pairs", "1", "--json", "-"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert "transformers" in result["manifest"]["reference"]
    assert result["equal_streams"] == 1.0
