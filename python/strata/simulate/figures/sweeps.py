"""Curves of throughput against TTFT out of simulations: first all requests at once, which says what a system sustains,
then rates at set parts of that, in geometric steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from strata.simulate.figures.curves import Curve, CurvePoint, EqualTtft, equal_ttft_ratio, peak
from strata.simulate.figures.drawing import Comparison, Estimate, Panel, Point, Series
from strata.simulate.figures.study import Case, Overrides, Study, estimate, hit_rate
from strata.simulate.report import Report
from strata.simulate.run import RATE_FIELDS

LOADS = (0.2, 0.28, 0.4, 0.57, 0.8, 1.13)
"""Rates, as parts of what the system sustains; each is the one before times the square root of 2."""
QUICK_LOADS = (0.57,)
X_LABEL = "output tokens per second"
Y_LABEL = "mean TTFT (s)"


@dataclass(frozen=True)
class Swept:
    """One system's curve. `loads` names each point; `reports` holds, for each point, a report a seed."""

    name: str
    loads: list[str]
    reports: list[list[Report]]

    @property
    def curves(self) -> list[Curve]:
        """A curve a seed."""
        return [
            [CurvePoint(report["ttft"]["mean"], report["output_tokens_per_s"]) for report in of_seed]
            for of_seed in zip(*self.reports, strict=True)
        ]

    @property
    def peak(self) -> Estimate:
        """The most output tokens per second."""
        return Estimate.of([peak(curve) for curve in self.curves])

    def series(self) -> Series:
        """The curve, ready to be drawn."""
        points = [
            Point(
                estimate(reports, lambda report: report["output_tokens_per_s"]),
                estimate(reports, lambda report: report["ttft"]["mean"]),
                load,
                {
                    "ttft_p99_s": estimate(reports, lambda report: report["ttft"]["p99"]),
                    "requests_per_s": estimate(reports, lambda report: report["requests_per_s"]),
                    "prefill_stall_share": estimate(reports, lambda report: report["prefill_stall_share"]),
                    "hit_rate": estimate(reports, hit_rate),
                    "refused": estimate(reports, lambda report: float(report["refused"])),
                },
            )
            for load, reports in zip(self.loads, self.reports, strict=True)
        ]
        return Series(self.name, points)


def sweep(
    study: Study, cases: Mapping[str, Case], loads: Sequence[float] = LOADS, base: str | None = None
) -> dict[str, Swept]:
    """A curve for each named case, over these parts of what it sustains; of what `base` sustains, if that is named:
    then all curves have points at the same rates."""
    if study.quick:
        loads = QUICK_LOADS
    saturated = study.reports(cases.values())
    sustained = {
        name: estimate(reports, lambda report: report["requests_per_s"]).mean
        for name, reports in zip(cases, saturated, strict=True)
    }
    rated: list[Case] = []
    for name, case in cases.items():
        workload = study.config(case, study.seeds[0])["workload"]
        rated += [case.but(arrivals(workload, load * sustained[base or name])) for load in loads]
    found = study.reports(rated)
    names = [
        *(f"{load:.2f} of {f'what {base} sustains' if base else 'sustained'}" for load in loads),
        "all at once",
    ]
    return {
        name: Swept(name, names, [*found[index * len(loads) : (index + 1) * len(loads)], saturated[index]])
        for index, name in enumerate(cases)
    }


def arrivals(workload: Mapping[str, Any], requests_per_s: float) -> Overrides:
    """What makes a workload bring about so many requests per second."""
    return {"workload": {RATE_FIELDS[workload["kind"]]: rate_of(workload, requests_per_s)}}


def rate_of(workload: Mapping[str, Any], requests_per_s: float) -> float:
    """The rate that a workload names for so many requests per second: some count sessions, some agents."""
    if workload.get("rate_of_sessions"):
        return requests_per_s * float(workload["sessions"]) / float(workload["rounds"])
    if workload.get("kind") == "tool_agents":
        return requests_per_s / requests_of_agent(workload)
    return requests_per_s


def requests_of_agent(workload: Mapping[str, Any]) -> float:
    """How many requests a tool agent makes on the mean."""
    return float(workload["steps"]["mean"] * (1 + workload["fan_out"] * (workload["fan_width"] - 1)))


def curve_panel(title: str, swept: Mapping[str, Swept]) -> Panel:
    """All curves in one pair of axes."""
    return Panel(title, X_LABEL, Y_LABEL, [one.series() for one in swept.values()], y_log=True)


def at_equal_ttft(base: Swept, other: Swept) -> tuple[Estimate | None, str]:
    """The largest ratio of throughputs at equal mean TTFT, over the seeds that have one, and where it is."""
    found = [equal_ttft_ratio(one, two) for one, two in zip(base.curves, other.curves, strict=True)]
    ratios = [one.ratio for one in found if one.ratio is not None]
    if not ratios:
        return None, found[0].why
    return Estimate.of(ratios), _where(found)


def _where(found: Sequence[EqualTtft]) -> str:
    levels = [one.ttft_s for one in found if one.ttft_s is not None]
    without = len(found) - len(levels)
    where = f"at a mean TTFT of {Estimate.of(levels)} s"
    return f"{where}; {without} of {len(found)} seeds have no TTFT that both reach" if without else where


def equal_ttft_comparison(
    name: str, base: Swept, other: Swept, paper: float, part: float | None
) -> Comparison:
    """The ratio beside the paper's; `part` of the paper's is the distance allowed."""
    value, where = at_equal_ttft(base, other)
    return Comparison(name, paper, value, None if part is None else part * paper, where)


def peak_comparison(name: str, base: Swept, other: Swept, paper: float, part: float | None) -> Comparison:
    """The ratio of the peaks beside the paper's."""
    ratios = [peak(two) / peak(one) for one, two in zip(base.curves, other.curves, strict=True)]
    return Comparison(name, paper, Estimate.of(ratios), None if part is None else part * paper)
