"""Every figure in its quick form: it is there, it draws, and what it shows follows from the table of constants."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from strata.errors import ConfigError
from strata.simulate.__main__ import main as simulate_main
from strata.simulate.constants import table
from strata.simulate.figures import FIGURES, Case, Kind, Study, figure_of
from strata.simulate.figures.beyond_loads import LOADS, Load, cases_of
from strata.simulate.figures.command import main
from strata.simulate.figures.drawing import (
    Comparison,
    Drawing,
    Estimate,
    Form,
    Panel,
    Point,
    Series,
    bar,
    exactly,
)
from strata.simulate.figures.ideas import DISK_IDEAS, IDEAS
from strata.simulate.figures.study import laid_over
from strata.simulate.figures.sweeps import arrivals, rate_of
from strata.simulate.figures.tables import tables_of

SELECTION = {
    8: ["--models", "llama-3.1-8b", "--workloads", "loogle,narrativeqa"],
    "beyond": ["--workloads", "loogle-14b,tool-agent"],
    "ideas": ["--models", "qwen2.5-14b", "--workloads", "loogle-14b"],
}
NUMBERS = sorted(FIGURES, key=str)
PIECES = 8192 // 32 * 32 * 2
"""Pages, layers and parts of Llama-3.1-8B's 8,192 tokens."""
BYTES = 8192 * 2 * 32 * 8 * 128 * 2


def points_of(drawing: Drawing) -> dict[tuple[str, str, str], Point]:
    """Every bar by panel, series and label."""
    return {
        (panel.title, series.name, point.label): point
        for panel in drawing.panels
        for series in panel.series
        for point in series.points
    }


def changed(*path: str, value: float) -> dict[str, Any]:
    """The shipped table with one number changed."""
    whole = copy.deepcopy(table())
    entry: Any = whole
    for name in path:
        entry = entry[name]
    entry["value"] = value
    return whole


def test_every_figure_that_holds_measurements_is_there() -> None:
    assert list(FIGURES) == [1, 2, 3, 5, 8, 9, 10, 11, 12, 13, 14, 15, "beyond", "ideas"]
    calibration = {number for number, figure in FIGURES.items() if figure.kind is Kind.CALIBRATION}
    assert calibration == {3, 5, 15}
    for number in calibration:
        assert "Calibration" in figure_of(number).caption
    for figure in FIGURES.values():
        assert len(figure.caption) > 80


def test_another_number_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match="--figure 4 is not drawn: choose of 1, 2, 3"):
        main(["--figure", "4"])


@pytest.mark.parametrize("number", NUMBERS)
def test_a_figure_becomes_tables_json_and_a_picture(
    number: int | str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / ("figure.svg" if NUMBERS.index(number) % 2 else "figure.png")
    where = tmp_path / "figure.json"
    files = ["--json", str(where), "--plot", str(picture)]
    assert main(["--figure", str(number), "--quick", *SELECTION.get(number, []), *files]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"{number}: {figure_of(number).title}" in shown
    assert "QUICK" in shown
    assert picture.stat().st_size > 5_000
    result = json.loads(where.read_text())
    assert result["figure"] == number
    assert result["manifest"]["seeds"] == [1]
    assert result["manifest"]["quick"] is True
    assert len(result["manifest"]["constants_sha256"]) == 64
    assert len(result["manifest"]["configurations_sha256"]) == 64
    points = [point for panel in result["panels"] for series in panel["series"] for point in series["points"]]
    assert points
    for point in points:
        for value in (point["x"], point["y"], *point["more"].values()):
            assert value["least"] <= value["mean"] <= value["most"]
        assert point.get("more", {}).get("refused", {"most": 0})["most"] == 0
    for comparison in result["comparisons"]:
        assert comparison["value"] is not None or comparison["remark"]


def test_the_command_draws_a_figure_or_says_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate_main(["--figure", "5", "--json", "-"]) == 0
    assert (
        json.loads(capsys.readouterr().out)["manifest"]["program"] == "python -m strata.simulate --figure 5"
    )
    assert simulate_main(["--figure=7"]) == 1
    assert "error: --figure 7 is not drawn" in capsys.readouterr().err


def test_figure_3_is_what_the_constants_give_by_hand() -> None:
    points = points_of(figure_of(3).draw(Study(table())))
    seconds = {
        ("h200", "piece"): PIECES * 3.2e-6 + BYTES / 64e9,
        ("gh200", "piece"): PIECES * 3.2e-6 + BYTES / 384e9,
        ("h200", "kernel"): BYTES / 48e9,
        ("gh200", "kernel"): BYTES / 150e9,
    }
    for (hardware, method), by_hand in seconds.items():
        operations = 0.0 if method == "piece" else 0.03  # a launch a layer and transfer
        shown = points["loading 8192 tokens in pages of 32", hardware, method].y.mean
        assert by_hand * 0.9999 <= shown <= by_hand * (1.0001 + operations)
        link = 64e9 if hardware == "h200" else 384e9
        share = points["of the link's bandwidth", hardware, method].y.mean
        assert share == pytest.approx(BYTES / link / shown, rel=1e-4)


def test_figure_5_is_what_the_table_says() -> None:
    points = points_of(figure_of(5).draw(Study(table())))
    assert points["load bandwidth", "h200", "kernel"].y.mean == 48.0
    assert points["speed lost beside a copy", "prefill", "kernel"].y.mean == 0.05
    assert points["speed lost beside a copy", "decode", "kernel"].y.mean == 0.1


def test_figure_15_is_what_the_constants_give_by_hand() -> None:
    piece = 32 * 8 * 128 * 2
    for (_, _, name), point in points_of(figure_of(15).draw(Study(table()))).items():
        system, machine = name.split()
        link, kernel, operation = {"PCIe": (64e9, 48e9, 5.04e-6), "GH": (384e9, 150e9, 3.2e-6)}[machine]
        if system == "sglang-hicache":
            assert point.y.mean == pytest.approx(piece / (operation + piece / link) / 1e9, rel=1e-3)
        else:
            assert 0.97 * kernel <= point.y.mean * 1e9 <= kernel * 1.0001


@pytest.mark.parametrize(
    ("number", "path", "value"),
    [
        (1, ("hardware", "h200", "prefill_efficiency"), 0.25),
        (3, ("hardware", "h200", "copies", "piece", "per_operation_s"), 6.4e-6),
        (5, ("hardware", "h200", "copies", "kernel", "to_device"), 40e9),
        (9, ("hardware", "h200", "prefill_efficiency"), 0.25),
        (13, ("hardware", "h20", "disk", "read"), 3.5e9),
    ],
)
def test_a_constant_redraws_and_changes_the_digest(number: int, path: tuple[str, ...], value: float) -> None:
    before, after = Study(table(), quick=True), Study(changed(*path, value=value), quick=True)
    drawings = [figure_of(number).draw(study) for study in (before, after)]
    assert drawings[0].panels != drawings[1].panels
    assert before.table_digest() != after.table_digest()


def test_a_source_is_no_constant() -> None:
    reworded = copy.deepcopy(table())
    reworded["hardware"]["h200"]["prefill_efficiency"]["source"] = "another"
    assert Study(reworded).table_digest() == Study(table()).table_digest()


def test_the_same_study_draws_the_same() -> None:
    studies = [Study(table(), seeds=(3, 4), workers=workers, quick=True) for workers in (1, 2)]
    one, two = (figure_of(1).draw(study) for study in studies)
    assert one == two
    assert studies[0].config_digest() == studies[1].config_digest()


def test_seeds_become_an_interval_around_their_mean() -> None:
    together = Study(table(), seeds=(1, 2), quick=True)
    apart = [Study(table(), seeds=(seed,), quick=True) for seed in (1, 2)]
    key = ("prefill time stalled for loads", "stalled", "sglang-hicache")
    values = [points_of(figure_of(1).draw(study))[key].y.mean for study in apart]
    assert points_of(figure_of(1).draw(together))[key].y == Estimate.of(values)
    assert values[0] != values[1]


def test_a_case_is_run_once_in_a_study() -> None:
    study = Study(table(), quick=True)
    case = Case("h200", "llama-3.1-8b", "ours", "loogle")
    (first,), (second,) = study.reports([case, case])
    assert first is second
    assert study.runs == 1


def test_small_pages_are_simulated_as_the_least_unless_the_figure_names_them() -> None:
    case = Case("h200", "llama-3.1-8b", "strata", "loogle")
    assert Study(table()).config(case, 1)["system"]["page_size"] == 16
    assert Study(table(), page_tokens=1).config(case, 1)["system"]["page_size"] == 1
    named = case.but({"system": {"page_size": 4}})
    assert Study(table()).config(named, 1)["system"]["page_size"] == 4


def test_a_device_gets_the_room_that_is_asked_for() -> None:
    study = Study(table(), quick=True)
    case = Case("h200", "llama-3.1-8b", "sglang-hicache", "loogle")
    limited = case.but({"hardware": {"device_bytes": study.device_bytes(case, 500_000)}})
    ((report,),) = study.reports([limited])
    assert report["pages"][0] * 32 == pytest.approx(500_000, rel=1e-3)
    assert study.token_bytes(case) == pytest.approx(2 * 32 * 8 * 128 * 2, rel=1e-4)


def test_overrides_are_laid_over_as_deep_as_they_go() -> None:
    below = {"system": {"page_size": 1, "copy": "piece"}, "warm": True}
    assert laid_over(below, {"system": {"copy": "kernel"}, "seed": 2}) == {
        "system": {"page_size": 1, "copy": "kernel"},
        "warm": True,
        "seed": 2,
    }


def test_rates_of_sessions_count_sessions() -> None:
    assert rate_of({"rate_of_sessions": True, "sessions": 10, "rounds": 40}, 8.0) == 2.0
    assert rate_of({"sessions": 10, "rounds": 40}, 8.0) == 8.0


def test_rates_of_tool_agents_count_agents() -> None:
    agents = {"kind": "tool_agents", "steps": {"mean": 8}, "fan_out": 0.25, "fan_width": 3}
    assert rate_of(agents, 24.0) == 2.0
    assert arrivals(agents, 24.0) == {"workload": {"agents_per_second": 2.0}}


@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.name)
def test_every_load_beyond_the_paper_is_the_same_for_all_systems(load: Load) -> None:
    study = Study(table(), quick=True)
    configs = [study.config(case, 1) for case in cases_of(study, load, ("strata", "ours")).values()]
    assert configs[0]["system"]["name"] != configs[1]["system"]["name"]
    for part in ("hardware", "model", "workload", "warm", "max_in_flight"):
        assert configs[0].get(part) == configs[1].get(part)


def test_what_was_changed_for_an_idea_is_all_that_differs() -> None:
    study = Study(table(), quick=True)
    ours = cases_of(study, LOADS[1], ("ours",))["ours"]
    for overrides in {**IDEAS, **DISK_IDEAS}.values():
        before, after = (study.config(case, 1)["system"] for case in (ours, ours.but(overrides)))
        changed_fields = {name for name in before if before[name] != after[name]}
        assert changed_fields
        assert changed_fields <= set(overrides["system"])


def test_a_grid_has_a_column_for_each_label_and_a_dash_where_there_is_no_value() -> None:
    rows = [
        Series("one", [bar("a", exactly(1.0)), bar("b", exactly(2.0))]),
        Series("two", [bar("b", exactly(3.0))]),
    ]
    (shown,) = tables_of(Drawing([Panel("grid", "row", "value", rows, Form.GRID)]))
    assert [str(column.header) for column in shown.columns] == ["row", "a", "b"]
    assert [list(column.cells) for column in shown.columns] == [["one", "two"], ["1", "-"], ["2", "3"]]


def test_a_comparison_holds_within_what_is_allowed() -> None:
    near, far = Estimate(0.7, 0.1, 0.9), Estimate(0.5, 0.5, 0.5)
    assert Comparison("", 0.74, near, 0.08).holds is True
    assert Comparison("", 0.74, far, 0.08).holds is False
    assert Comparison("", 0.74, None, 0.08, "no common TTFT").holds is False
    assert Comparison("", 0.74, far).holds is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--figure", "9", "--models", "llama-3.1-8b"], "--models and --workloads are for figure 8, beyond"),
        (["--figure", "8", "--quick", "--models", "gpt"], "--models gpt is not in this figure"),
        (["--figure", "1", "--plot", "figure.bmp"], "must end in one of"),
        (["--figure", "1", "--processes", "0"], "--processes 0 is too small"),
    ],
)
def test_flags_that_do_not_fit_are_refused_before_the_work(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        main(arguments)
