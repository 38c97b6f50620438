"""`python -m strata.simulate`: JSON, trace and errors, and stall sums that the trace and the report agree on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from small import WORKLOAD

from strata.cli.main import main as strata
from strata.errors import ConfigError
from strata.simulate.__main__ import main, overrides_of

NAMES = ["--hardware", "h200", "--model", "qwen2.5-14b", "--system", "sglang-hicache", "--workload", "loogle"]
SMALL = [
    *NAMES,
    *("--warm", "--rate", "30", "--seed", "3"),
    *("--set", f"workload={json.dumps(WORKLOAD)}", "--set", "hardware.device_bytes=36e9"),
]


def test_a_run_gives_a_table_json_and_a_trace_that_agree(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    command = [sys.executable, "-m", "strata.simulate", *SMALL, "--json", "-", "--perfetto", str(trace)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "time to first token" in done.stderr
    result = json.loads(done.stdout)
    report = result["report"]
    assert (report["finished"], report["seed"]) == (40, 3)
    assert result["configuration"]["workload"]["rate"] == 30.0
    assert result["manifest"]["seed"] == 3 and result["manifest"]["arguments"][: len(SMALL)] == SMALL

    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    spans = [(tracks[event["tid"]], event) for event in events if event["ph"] == "X"]
    assert {"device compute", "device stalls", "host to device"} <= {track for track, _ in spans}
    stalled = sum(event["dur"] for track, event in spans if track == "device stalls") / 1e6
    assert stalled > 0 and stalled == pytest.approx(sum(report["stalls"].values()), abs=1e-6)
    computed = sum(event["dur"] for track, event in spans if track == "device compute") / 1e6
    assert computed == pytest.approx(report["prefill_busy_s"] + report["decode_busy_s"], abs=1e-6)
    copied = sum(event["dur"] for track, event in spans if track == "host to device") / 1e6
    assert copied == pytest.approx(report["link_busy_s"][0], abs=1e-6)


def test_the_same_flags_give_the_same_report(capsys: pytest.CaptureFixture[str]) -> None:
    reports = []
    for command in (main, lambda flags: strata(["simulate", *flags])):
        assert command([*SMALL, "--json", "-"]) == 0
        reports.append(json.loads(capsys.readouterr().out)["report"])
    assert reports[0] == reports[1]


def test_list_shows_the_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "--json", "-"]) == 0
    shown = capsys.readouterr()
    names = json.loads(shown.out)
    assert "h200" in names["hardware"] and "strata" in names["systems"]
    assert "--workload" in shown.err and "tool-agent" in shown.err


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ([], "--hardware is missing: choose h200"),
        ([*NAMES, "--hardware", "abacus"], "--hardware 'abacus' is unknown: choose h200"),
        ([*NAMES, "--system", "base"], "--system 'base' is unknown: choose no-hierarchy"),
        ([*NAMES, "--rate", "0"], "--rate 0 is no rate"),
        ([*NAMES, "--set", "system.page=1"], "unknown field `page`"),
        ([*NAMES, "--set", "system"], "is no KEY=VALUE"),
        ([*NAMES, "--constants", "missing.json"], "--constants missing.json cannot be read"),
        ([*NAMES, "--json", "missing/out.json"], "its folder does not exist"),
        ([*NAMES, "--perfetto", "missing/out.json"], "its folder does not exist"),
    ],
)
def test_errors_name_the_flag_and_the_remedy(
    flags: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags) == 1
    assert complaint in capsys.readouterr().err


def test_settings_are_json_where_they_can_be() -> None:
    settings = ["a.b=1", "a.c=two", "a.d=true", "e=[1, 2]", "a.f=x=y"]
    assert overrides_of(settings) == {"a": {"b": 1, "c": "two", "d": True, "f": "x=y"}, "e": [1, 2]}
    for wrong in (["a"], ["=1"], ["a..b=1"], ["a=1", "a.b=2"]):
        with pytest.raises(ConfigError, match="--set"):
            overrides_of(wrong)
