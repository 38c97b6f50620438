"""Figure 11: what each part of Strata adds to the peak, by how far apart the questions about a context are."""

from __future__ import annotations

from collections.abc import Sequence

from strata.simulate.figures.drawing import Comparison, Drawing, Estimate, Form, Panel, Series, bar
from strata.simulate.figures.study import Case, Overrides, Study
from strata.simulate.report import Report

CAPTION = (
    "The paper breaks Strata's peak throughput down by its parts, for Qwen2.5-14B and LooGLE in three orders: by "
    "chance (shuffle), all questions about a context in a row (minimum), a question about each context in turn "
    "(maximum). Each step adds a part to the one before; bundles come with balance. Peaks are with 128 requests in "
    "flight throughout."
)
ORDERS = ("minimum", "shuffle", "maximum")
ALL_OFF = ("defer", "balance", "bundles", "bubbles", "early-loads")


def _without(*kept: str) -> Overrides:
    return {"system": {"scheduler_off": [part for part in ALL_OFF if part not in kept]}}


STEPS: dict[str, tuple[str, Overrides]] = {
    "sglang-hicache": ("sglang-hicache", {}),
    "+ copies": ("strata-io", {}),
    "+ delay hits": ("strata", _without("defer")),
    "+ balance": ("strata", _without("defer", "balance", "bundles")),
    "+ bubbles": ("strata", {}),
}
PAPER = {
    ("shuffle", "+ copies"): 1.76,
    ("maximum", "+ copies"): 1.95,
    ("minimum", "+ delay hits"): 1.42,
    ("maximum", "+ delay hits"): 1.0,
    ("shuffle", "+ balance"): 1.11,
    ("maximum", "+ balance"): 1.12,
    ("shuffle", "+ bubbles"): 1.08,
    ("maximum", "+ bubbles"): 1.03,
}


def over(reports: Sequence[Report], base: Sequence[Report]) -> Estimate:
    """Throughput over throughput, seed by seed."""
    pairs = zip(reports, base, strict=True)
    return Estimate.of([one["output_tokens_per_s"] / two["output_tokens_per_s"] for one, two in pairs])


def draw(study: Study) -> Drawing:
    """Peaks over the first step's, by order."""
    cases = [
        Case("h200", "qwen2.5-14b", system, "loogle", {**overrides, "workload": {"order": order}})
        for order in ORDERS
        for system, overrides in STEPS.values()
    ]
    keys = [(order, step) for order in ORDERS for step in STEPS]
    found = dict(zip(keys, study.reports(cases), strict=True))
    first, *_ = STEPS
    series = [
        Series(step, [bar(order, over(found[order, step], found[order, first])) for order in ORDERS])
        for step in STEPS
    ]
    before = dict(zip(list(STEPS)[1:], STEPS, strict=False))
    return Drawing(
        [Panel("peak throughput", "order of the questions", "of sglang-hicache's", series, Form.BARS)],
        [
            Comparison(
                f"{order}: {step.removeprefix('+ ')} over the step before",
                paper,
                over(found[order, step], found[order, before[step]]),
            )
            for (order, step), paper in PAPER.items()
        ],
    )
