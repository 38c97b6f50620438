"""Beyond the paper: how much of the gap between the published scheduler and an oracle ours closes, in throughput at
equal mean TTFT, and what becomes of the tail at a load that the published one can carry.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from strata.simulate.figures.beyond_loads import EXPLANATION, Load, cases_of, selected
from strata.simulate.figures.drawing import Drawing, Estimate, Form, Panel, Series, bar
from strata.simulate.figures.gap import LEAST_GAP, Gap, gap
from strata.simulate.figures.study import Study
from strata.simulate.figures.sweeps import Swept, arrivals, curve_panel, sweep
from strata.simulate.report import Report

SYSTEMS = ("strata", "ours", "oracle")
LOADS = (0.3, 0.4, 0.5, 0.65, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5)
"""Rates, as parts of what strata sustains, the same for all: close together where TTFT rises steeply, and up to where
the oracle has its peak. Between points of other rates a curve would be read off chords of another length."""
TAIL_LOAD = 0.8
"""The part of the published scheduler's peak rate at which the tails are compared."""
ASKED_SHARE = 0.5
ASKED_LEAST = 0.99
ASKED_TAIL = 0.7
TAIL_GAP = 0.6
CAPTION = (
    "The published scheduler (strata), ours, and ours with transfers that take no time (oracle). "
    f"{EXPLANATION} A system's throughput at a mean TTFT is the best that it has at no larger one, log-linear between "
    "points. Share closed is (ours - strata) / (oracle - strata) in output tokens per second, at the mean TTFT of "
    "strata's peak and as least and most over all TTFTs from the largest of the three least ones to there; where the "
    "oracle is less than 3 % ahead there is no gap. TTFT counts from submission."
)


def draw(study: Study) -> Drawing:
    """The curves of each load, and what they say."""
    panels: list[Panel] = []
    gaps: list[Series] = []
    tails: list[Series] = []
    remarks: list[str] = []
    for load in selected(study):
        cases = cases_of(study, load, SYSTEMS)
        swept = sweep(study, cases, LOADS, "strata")
        panels.append(curve_panel(f"{load.name}: {load.model}", swept))
        found = [gap(*curves) for curves in zip(*(swept[name].curves for name in SYSTEMS), strict=True)]
        row = _gaps(load, found)
        gaps.append(row)
        tail = _tails(study, load, swept)
        tails.append(tail)
        remarks.append(f"{load.name}: {_verdict(row, tail)}")
    panels.append(Panel("gap", "load", "throughput at equal mean TTFT", gaps, Form.GRID))
    panels.append(Panel("tail", "load", f"P99 TTFT at {TAIL_LOAD:g} of strata's peak rate", tails, Form.GRID))
    return Drawing(panels, remarks=remarks)


def _gaps(load: Load, found: Sequence[Gap]) -> Series:
    def over(value: Callable[[Gap], float]) -> Estimate:
        return Estimate.of([value(one) for one in found])

    points = [
        bar("at TTFT (s)", over(lambda one: one.at_peak.ttft_s)),
        bar("oracle/strata", over(lambda one: one.at_peak.oracle)),
        bar("ours/strata", over(lambda one: one.at_peak.other)),
        bar("least ours/strata", over(lambda one: one.least_other)),
    ]
    closed = [one.at_peak.closed for one in found]
    shares = [share for share in closed if share is not None]
    if shares and points[1].y.mean >= LEAST_GAP:
        points.append(bar("share closed", Estimate.of(shares)))
    everywhere = [one.shares for one in found if one.shares]
    if everywhere:
        points.append(bar("least share", Estimate.of([min(one) for one in everywhere])))
        points.append(bar("most share", Estimate.of([max(one) for one in everywhere])))
    points.append(bar("peak ours/strata", over(lambda one: one.peak_other)))
    points.append(bar("peak oracle/strata", over(lambda one: one.peak_oracle)))
    return Series(load.name, points)


def _tails(study: Study, load: Load, swept: dict[str, Swept]) -> Series:
    cases = cases_of(study, load, SYSTEMS)
    rate = TAIL_LOAD * peak_rate(swept["strata"])
    workload = study.config(cases["strata"], study.seeds[0])["workload"]
    base, ours, oracle = study.reports(case.but(arrivals(workload, rate)) for case in cases.values())
    return Series(
        load.name,
        [
            bar("requests/s", Estimate.of([rate])),
            bar("strata (s)", Estimate.of([_tail(report) for report in base])),
            bar("ours/strata", ratios(ours, base, _tail)),
            bar("oracle/strata", ratios(oracle, base, _tail)),
            bar("mean ours/strata", ratios(ours, base, _mean)),
            bar("mean oracle/strata", ratios(oracle, base, _mean)),
        ],
    )


def peak_rate(swept: Swept) -> float:
    """Requests per second at the peak, on the mean of the seeds."""
    rates = [
        max(of_seed, key=lambda report: report["output_tokens_per_s"])["requests_per_s"]
        for of_seed in zip(*swept.reports, strict=True)
    ]
    return Estimate.of(rates).mean


def ratios(reports: Sequence[Report], base: Sequence[Report], value: Callable[[Report], float]) -> Estimate:
    """A value over the base's, seed by seed."""
    return Estimate.of([value(one) / value(two) for one, two in zip(reports, base, strict=True)])


def _tail(report: Report) -> float:
    return report["ttft"]["p99"]


def _mean(report: Report) -> float:
    return report["ttft"]["mean"]


def _verdict(gaps: Series, tails: Series) -> str:
    gap_of = {point.label: point.y for point in gaps.points}
    tail_of = {point.label: point.y for point in tails.points}
    if "share closed" in gap_of:
        share = gap_of["share closed"].mean
        said = [f"{share:.0%} of the gap closed ({_judged(share >= ASKED_SHARE)}: {ASKED_SHARE:.0%})"]
    else:
        said = ["there is no gap"]
    least = gap_of["least ours/strata"].least
    said.append(f"never below {least:.3f} of strata ({_judged(least >= ASKED_LEAST)}: {ASKED_LEAST:g})")
    ours, oracle = tail_of["ours/strata"].mean, tail_of["oracle/strata"].mean
    asked = _judged(ours <= ASKED_TAIL) + f": {ASKED_TAIL:g}" if oracle < TAIL_GAP else "nothing is asked"
    said.append(f"P99 TTFT {ours:.2f} of strata's, the oracle {oracle:.2f} ({asked})")
    return "; ".join(said)


def _judged(holds: bool) -> str:
    return "reached" if holds else "NOT reached"
