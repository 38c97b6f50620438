"""The measurement of decisions: its fields, and that Core gets into the state that it speaks of."""

from __future__ import annotations

import json

import pytest

from strata.bench import sched
from strata.errors import ConfigError


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "static", "adaptive"])
def test_sched_json_has_the_times_of_decisions_and_events(
    capsys: pytest.CaptureFixture[str], policy: str
) -> None:
    flags = ["--waiting", "200", "--decisions", "20", "--policy", policy, "--json", "-"]
    assert sched.main(flags) == 0
    shown = capsys.readouterr()
    result = json.loads(shown.out)
    assert set(result) == {
        "waiting",
        "policy",
        "decision_us_p50",
        "decision_us_p99",
        "event_us_amortised",
        "manifest",
    }
    assert (result["waiting"], result["policy"]) == (200, policy)
    assert 0 < result["decision_us_p50"] <= result["decision_us_p99"]
    assert result["event_us_amortised"] > 0
    assert result["manifest"]["decisions"] == 20
    assert "200 requests waiting" in shown.err


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--waiting", "1"], "--waiting 1 is too small"),
        (["--decisions", "0"], "--decisions 0 is too small"),
        (["--waiting", "10", "--policy", "best"], "--policy .best. is unknown"),
    ],
)
def test_sched_refuses_what_cannot_be_measured(flags: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        sched.main(flags)


def test_bounds_are_those_of_the_number_that_waits() -> None:
    result = {"decision_us_p50": 50.0, "decision_us_p99": 600.0}
    names = [bound.name for bound in sched.bounds_of({**result, "waiting": 10_000})]
    assert names == ["decision, median", "decision, p99"]
    assert [bound.most for bound in sched.bounds_of({**result, "waiting": 1_000})] == [20.0]
    assert sched.bounds_of({**result, "waiting": 500}) == []
