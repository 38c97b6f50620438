"""The measurement of the server's own part, over real HTTP."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from strata.bench import http_overhead_command


def test_each_form_of_answer_is_measured(tmp_path: Path) -> None:
    target = tmp_path / "result.json"
    flags = ["--rate", "40", "--seconds", "1", "--rounds", "2", "--prompts", "4", "--tokens", "64"]
    assert http_overhead_command.main([*flags, "--json", str(target)]) == 0
    result = json.loads(target.read_text(encoding="utf-8"))
    for figures in result["forms"].values():
        assert figures["requests"] == 80
        # All but the last page, of which the one computed token is a part.
        assert figures["cached_share"] == pytest.approx(48 / 64)
        assert 0 < figures["http_ms_p50"] <= figures["http_ms_p99"] <= figures["http_ms_p100"]
        assert figures["engine_ms_p50"] > 0
        assert len(figures["http_ms_p99_by_round"]) == 2
    assert [bound["value"] for bound in result["bounds"]] == [
        figures["http_ms_p99"] for figures in result["forms"].values()
    ]
