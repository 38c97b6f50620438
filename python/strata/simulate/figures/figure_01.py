"""Figure 1: how many tokens a prefill batch loads for each that it computes, and how much of the prefill's time is
stalled for loads: copies per piece, the kernel, the kernel under Strata's scheduler.
"""

from __future__ import annotations

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
from strata.simulate.figures.study import Case, Study, estimate

CAPTION = (
    "The paper draws the distribution of the load/compute ratio over prefill batches and the share of prefill time "
    "stalled for loads, for Qwen2.5-14B and LooGLE on an H200. Its request rate is not stated: here all requests come "
    "at once, 128 in flight, with an empty cache. The ratio is known at 0, 200 and 500 and at quantiles, hence steps."
)
SYSTEMS = ("sglang-hicache", "strata-io", "strata")
PAPER = {"sglang-hicache": 0.74, "strata-io": 0.24}
RATIOS = {0: 0.14, 200: 0.5, 500: 0.89}


def draw(study: Study) -> Drawing:
    """The distribution, the stalls, and the paper's numbers."""
    found = study.reports(Case("h200", "qwen2.5-14b", system, "loogle") for system in SYSTEMS)
    runs = dict(zip(SYSTEMS, found, strict=True))
    stalls = {
        name: estimate(reports, lambda one: one["prefill_stall_share"]) for name, reports in runs.items()
    }
    base = runs["sglang-hicache"]
    parts = [
        estimate(base, lambda one, place=place: one["load_per_compute_at"][place])  # type: ignore[misc]
        for place in range(len(RATIOS))
    ]
    distribution = [Point(exactly(ratio), part, "") for ratio, part in zip(RATIOS, parts, strict=True)]
    for name, part in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        ratio = Estimate.of([float(one["load_per_compute"][name]) for one in base])  # type: ignore[literal-required]
        distribution.append(Point(ratio, exactly(part), name))
    distribution.sort(key=lambda point: (point.x.mean, point.y.mean))
    return Drawing(
        [
            Panel(
                "prefill batches by loaded tokens per computed token",
                "loaded per computed token, at most",
                "share of prefill batches",
                [Series("sglang-hicache", distribution)],
                Form.STEPS,
            ),
            Panel(
                "prefill time stalled for loads",
                "",
                "share of prefill time",
                [Series("stalled", [bar(name, stall) for name, stall in stalls.items()])],
                Form.BARS,
            ),
        ],
        [
            *(
                Comparison(f"stalled share of prefill, {name}", paper, stalls[name], 0.08)
                for name, paper in PAPER.items()
            ),
            *(
                Comparison(f"batches that load at most {ratio} per computed token", paper, part)
                for (ratio, paper), part in zip(RATIOS.items(), parts, strict=True)
            ),
        ],
    )
