"""Policies beside each other: runs take turns on servers of their own, ratios are those of equal seeds, and the page
for the documentation holds what the JSON holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from strata.bench import policies_command
from strata.bench.policies_command import plans_of
from strata.bench.policies_report import Stage, Variant, bounds_of, markdown_of, stage_as_json
from strata.errors import ConfigError

SMALL = ["--documents", "3", "--tokens", "300", "--max-tokens", "4", "--requests", "4", "--rates", "100,200"]
SIZES = ["--device-memory", "4MiB", "--host-memory", "8MiB", "--copy-bandwidth", "0"]
FCFS, ADAPTIVE = Variant("fcfs", "fcfs"), Variant("adaptive", "adaptive")


def run_of(rate: float, seed: int, speed: float, ttft_s: float) -> dict[str, Any]:
    """What `bench serve` says of a run, in short."""
    figures = {
        "seconds": 3.0,
        "output_tokens_per_s": speed,
        "ttft_s_mean": ttft_s,
        "ttft_s_p50": ttft_s,
        "ttft_s_p90": 2 * ttft_s,
    }
    return {"rate": rate, "seed": seed, "figures": figures, "server_stats": {"load_bytes": 2e6}}


@pytest.fixture
def stage() -> Stage:
    """Adaptive is 2, 3 and 4 times as fast as fcfs at the same seed; seeds differ by more than that."""
    made = Stage("policies", "fcfs", (FCFS, ADAPTIVE))
    for seed, factor in ((1, 2), (2, 3), (3, 4)):
        made.add(FCFS, run_of(1.0, seed, 10.0**seed, 1.0))
        made.add(ADAPTIVE, run_of(1.0, seed, factor * 10.0**seed, 1 / factor))
    return made


def test_ratios_are_between_runs_of_one_seed(stage: Stage) -> None:
    ratios = stage.ratios("adaptive", 1.0)
    assert ratios["output_tokens_per_s"] == {"median": 3.0, "least": 2.0, "most": 4.0}
    assert ratios["ttft_s_p90"]["most"] == 0.5
    assert stage.ratios("fcfs", 1.0) == {}
    fcfs, adaptive = stage_as_json(stage)["comparison"]
    assert fcfs["figures"]["output_tokens_per_s"]["median"] == 100 and fcfs["ratios"] == {}
    assert adaptive["ratios"] == ratios and adaptive["figures"]["loaded_bytes"]["median"] == 2e6


def test_a_run_that_is_missing_is_left_out_of_the_ratios(stage: Stage) -> None:
    stage.results["fcfs"].pop()
    assert stage.ratios("adaptive", 1.0)["output_tokens_per_s"]["most"] == 3.0
    stage.results["fcfs"].clear()
    assert stage.ratios("adaptive", 1.0) == {} and bounds_of(stage) == []


def test_the_promise_is_judged_by_the_medians(stage: Stage) -> None:
    first, second = bounds_of(stage)
    assert first.name == "P90 TTFT at 1/s" and first.value == pytest.approx(1 / 3) and first.holds
    assert second.name == "output tokens/s at 1/s" and second.value == pytest.approx(1 / 3) and second.holds
    slower = Stage("policies", "fcfs", (FCFS, ADAPTIVE))
    slower.add(FCFS, run_of(1.0, 1, 10.0, 1.0))
    slower.add(ADAPTIVE, run_of(1.0, 1, 11.9, 1.01))
    assert [bound.holds for bound in bounds_of(slower)] == [False, False]
    assert bounds_of(Stage("parts", "adaptive", (ADAPTIVE,))) == []


def test_markdown_has_a_row_a_rate_and_variant(stage: Stage) -> None:
    lines = markdown_of([stage]).splitlines()
    rows = [line for line in lines if line.startswith("| 1 |")]
    assert len(rows) == 4, "two variants, in the table of times and in that of counters"
    assert "3.00 (2.00..4.00)" in rows[1] and "| 2 |" in rows[3], "MB loaded"
    heads = [line for line in lines if "| variant |" in line]
    for head, mine in zip(heads, (rows[:2], rows[2:]), strict=True):
        assert {row.count("|") for row in mine} == {head.count("|")}


def test_policies_and_parts_take_turns(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    flags = ["--model", str(folder), *SIZES, *SMALL, "--seeds", "5", "--policies", "fcfs,adaptive"]
    flags += ["--parts-off", "bubbles", "--markdown", str(page), "--json", "-"]
    assert policies_command.main(flags) == 0
    shown = capsys.readouterr()
    result = json.loads(shown.out)
    assert "policies: 4 runs on 2 servers" in shown.err and "parts: 2 runs on 2 servers" in shown.err
    policies, parts = result["stages"]
    assert [(row["rate"], row["variant"]) for row in policies["comparison"]] == [
        (100, "fcfs"),
        (100, "adaptive"),
        (200, "fcfs"),
        (200, "adaptive"),
    ]
    assert [(row["rate"], row["variant"]) for row in parts["comparison"]] == [
        (200, "adaptive"),
        (200, "adaptive, no bubbles"),
    ]
    for run in policies["runs"] + parts["runs"]:
        assert run["figures"]["failed"] == 0 and run["figures"]["output_tokens"] == 4 * 4
        assert run["figures"]["tokens_host"] > 0 and run["figures"]["loaded_bytes"] > 0
    assert {bound["name"] for bound in result["bounds"]} == {
        "P90 TTFT at 100/s",
        "P90 TTFT at 200/s",
        "output tokens/s at 200/s",
    }
    assert result["manifest"]["settings"]["page_size"] == 16 and not result["failures"]
    assert page.read_text(encoding="utf-8").count("adaptive, no bubbles") == 2


def test_parts_are_run_at_one_rate() -> None:
    options = policies_command.parser_of_policies("x").parse_args(["--rates", "1,3,2", "--seeds", "1,2"])
    policies, parts = plans_of(options)
    assert [variant.name for variant in policies.variants] == ["fcfs", "lpm", "static", "adaptive"]
    assert len(policies.draws) == 6 and policies.baseline == "fcfs"
    assert [(draw.rate, draw.seed) for draw in parts.draws] == [(3, 1), (3, 2)]
    assert parts.baseline == "adaptive"
    assert [variant.off for variant in parts.variants] == [
        "",
        "defer",
        "followers",
        "balance",
        "bundles",
        "bubbles",
        "early-loads",
        "worth",
        "passing",
    ]


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--policies", "best"], "--policies 'best' is none"),
        (["--parts-off", "nothing"], "--parts-off 'nothing' is none"),
        (["--parts-of", "fcfs"], "--parts-of 'fcfs' is none"),
        (["--policies", "", "--parts-off", ""], "nothing is left to measure"),
        (["--policy", "fcfs"], "--policy is what differs"),
        (["--url", "http://127.0.0.1:9"], "--url and --plot are for `bench serve`"),
        (["--markdown", "/no/such/x.md"], "its folder does not exist"),
    ],
)
def test_what_cannot_be_compared_is_refused_at_once(flags: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError) as raised:
        policies_command.main(flags)
    assert complaint in str(raised.value)
