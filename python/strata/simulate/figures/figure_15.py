"""Figure 15, calibration: the bandwidth that loads sustain while the systems of figure 14 serve."""

from __future__ import annotations

from strata.simulate.figures.drawing import Comparison, Drawing, Form, Panel, Series, bar
from strata.simulate.figures.figure_14 import cases
from strata.simulate.figures.study import Study, estimate
from strata.simulate.report import Report

CAPTION = (
    "Calibration: follows from the constants. The paper draws the bandwidth that loads sustain in figure 14's task: "
    "Strata-IO's rises from 40 GB/s on PCIe to 150 on GH200. Here it is the loaded bytes over the time in which the "
    "link to the device moved something, with 128 requests in flight throughout."
)
PAPER = {"strata-io PCIe": 40.0, "strata-io GH": 150.0}


def draw(study: Study) -> Drawing:
    """GB/s of each system on each machine."""
    selected = {name: case for name, case in cases().items() if case.system != "oracle"}
    token_bytes = study.token_bytes(next(iter(selected.values())))

    def bandwidth(report: Report) -> float:
        busy = report["link_busy_s"][0]
        return report["prompt_tokens"]["host"] * token_bytes / busy / 1e9 if busy else 0.0

    found = study.reports(selected.values())
    values = {name: estimate(reports, bandwidth) for name, reports in zip(selected, found, strict=True)}
    bars = [bar(name, value) for name, value in values.items()]
    return Drawing(
        [Panel("host to device", "", "GB/s", [Series("sustained", bars)], Form.BARS)],
        [Comparison(f"GB/s of {name}", paper, values[name]) for name, paper in PAPER.items()],
    )
