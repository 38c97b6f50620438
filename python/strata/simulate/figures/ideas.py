"""What each idea of ours brings: the same load with one part of our system off at a time."""

from __future__ import annotations

from collections.abc import Mapping

from strata.simulate.figures.beyond import TAIL_LOAD, peak_rate, ratios
from strata.simulate.figures.beyond_loads import EXPLANATION, Load, cases_of, selected
from strata.simulate.figures.curves import Curve, envelope, throughput_at
from strata.simulate.figures.drawing import Drawing, Estimate, Form, Panel, Point, Series, bar
from strata.simulate.figures.study import Case, Overrides, Study
from strata.simulate.figures.sweeps import Swept, arrivals, sweep
from strata.simulate.report import Report

LOADS = (0.65, 0.8, 0.95)
"""Rates, as parts of what each variant sustains: around the TTFT of the published scheduler's peak."""
LONG_DEFERRAL = 1e6


def _off(*parts: str) -> Overrides:
    return {"system": {"scheduler_off": list(parts)}}


IDEAS: Mapping[str, Overrides] = {
    "without delay hits deferred": _off("defer"),
    "without followers on published chunks": _off("followers"),
    "without balance": _off("balance"),
    "without bundles": _off("bundles"),
    "without bubbles": _off("bubbles"),
    "without early loads": _off("early-loads"),
    "without room for early loads": {"system": {"early_share": 0.0}},
    "without worth": _off("worth"),
    "without passing": _off("passing"),
    "balance by ratio, not time": {"system": {"policy": "static"}},
    "deferral hardly waits": {"system": {"deferral_factor": 0.0}},
    "deferral unbounded": {"system": {"deferral_factor": LONG_DEFERRAL}},
    "always loads": {"system": {"always_loads": True}},
}
DISK_IDEAS: Mapping[str, Overrides] = {
    "disk by best effort": {"system": {"prefetch_policy": "best_effort"}},
    "disk by best effort, always loads": {"system": {"prefetch_policy": "best_effort", "always_loads": True}},
}
CAPTION = (
    "Each row is our system with one part changed. Throughput at the mean TTFT of the published scheduler's peak (the "
    "best at no larger TTFT) and P99 and mean TTFT at 0.8 of that scheduler's peak rate, all over our system's: below "
    "1 in throughput, above 1 in TTFT, is what the part brings. Ratio instead of time also leaves worth, early "
    "loads and passing out. "
    f"{EXPLANATION}"
)
OURS = "ours"


def draw(study: Study) -> Drawing:
    """A grid each for throughput, P99 and mean TTFT: ideas by loads."""
    grids: dict[str, dict[str, list[Point]]] = {"throughput": {}, "P99 TTFT": {}, "mean TTFT": {}}
    for load in selected(study):
        for idea, values in _of_load(study, load).items():
            for name, value in zip(grids, values, strict=True):
                grids[name].setdefault(idea, []).append(bar(load.name, value))
    labels = {
        "throughput": "at equal mean TTFT, over ours",
        "P99 TTFT": f"at {TAIL_LOAD:g} of strata's peak rate, over ours",
        "mean TTFT": f"at {TAIL_LOAD:g} of strata's peak rate, over ours",
    }
    return Drawing(
        [
            Panel(
                name, "idea", labels[name], [Series(idea, points) for idea, points in rows.items()], Form.GRID
            )
            for name, rows in grids.items()
        ]
    )


def _of_load(study: Study, load: Load) -> dict[str, tuple[Estimate, Estimate, Estimate]]:
    base = cases_of(study, load, ("strata",))["strata"]
    ours = cases_of(study, load, (OURS,))[OURS]
    ideas = {**IDEAS, **(DISK_IDEAS if load.name == "disk" else {})}
    variants = {OURS: ours, **{idea: ours.but(overrides) for idea, overrides in ideas.items()}}
    swept = sweep(study, {"strata": base, **variants}, LOADS)
    levels = [envelope(curve)[-1].ttft_s for curve in swept["strata"].curves]
    at_rate = _tail_reports(study, variants, TAIL_LOAD * peak_rate(swept["strata"]))
    return {
        idea: (
            _throughput(swept[idea], swept[OURS], levels),
            ratios(at_rate[idea], at_rate[OURS], lambda report: report["ttft"]["p99"]),
            ratios(at_rate[idea], at_rate[OURS], lambda report: report["ttft"]["mean"]),
        )
        for idea in ideas
    }


def _tail_reports(study: Study, variants: Mapping[str, Case], rate: float) -> dict[str, list[Report]]:
    workload = study.config(variants[OURS], study.seeds[0])["workload"]
    found = study.reports(case.but(arrivals(workload, rate)) for case in variants.values())
    return dict(zip(variants, found, strict=True))


def _throughput(variant: Swept, ours: Swept, levels: list[float]) -> Estimate:
    def at(curve: Curve, ttft_s: float) -> float:
        rising = envelope(curve)
        return throughput_at(rising, max(ttft_s, rising[0].ttft_s))

    curves = zip(variant.curves, ours.curves, levels, strict=True)
    return Estimate.of([at(one, ttft_s) / at(two, ttft_s) for one, two, ttft_s in curves])
