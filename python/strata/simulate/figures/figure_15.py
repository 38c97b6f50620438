"""Figure 15, calibration: the bandwidth that the loads of figure 14's systems sustain."""

from __future__ import annotations

from strata.simulate.figures.drawing import Comparison, Drawing, Form, Panel, Series, bar
from strata.simulate.figures.figure_14 import cases
from strata.simulate.figures.study import Case, Study, estimate
from strata.simulate.report import Report

CAPTION = (
    "Calibration: follows from the constants. The paper draws the bandwidth that loads sustain in figure 14's task. "
    "Here it is a load of one LooGLE context of the mean length, with nothing else under way: bytes over the time in "
    "which the link moved them. What else slows a link in a busy machine is not in it."
)
PAPER = {
    "sglang-hicache PCIe": 10.8,
    "sglang-hicache GH": 19.43,
    "strata-io PCIe": 40.3,
    "strata-io GH": 150.5,
}


def lone_load(case: Case) -> Case:
    """One question about one context of the mean length that only the host holds."""
    workload = {"contexts": 1, "queries": 1, "context_tokens": {"sigma": 0.0}}
    return case.but({"warm": True, "workload": workload})


def draw(study: Study) -> Drawing:
    """GB/s of each system on each machine."""
    selected = {name: lone_load(case) for name, case in cases().items() if case.system != "oracle"}
    token_bytes = study.token_bytes(next(iter(selected.values())))

    def bandwidth(report: Report) -> float:
        return report["prompt_tokens"]["host"] * token_bytes / report["link_busy_s"][0] / 1e9

    found = study.reports(selected.values())
    values = {name: estimate(reports, bandwidth) for name, reports in zip(selected, found, strict=True)}
    bars = [bar(name, value) for name, value in values.items()]
    return Drawing(
        [Panel("host to device", "", "GB/s", [Series("sustained", bars)], Form.BARS)],
        [Comparison(f"GB/s of {name}", paper, values[name]) for name, paper in PAPER.items()],
    )
