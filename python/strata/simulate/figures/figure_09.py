"""Figure 9: what Strata's copies and its scheduler each bring: throughput against TTFT, and the peaks."""

from __future__ import annotations

from strata.simulate.figures.drawing import Drawing, Form, Panel, Series, bar
from strata.simulate.figures.study import Case, Study
from strata.simulate.figures.sweeps import curve_panel, peak_comparison, sweep

CAPTION = (
    "The paper draws throughput against mean TTFT for Qwen2.5-14B and LooGLE on an H200, and reports the peaks of the "
    "variants over SGLang-HiCache. `ours` is this repository's own configuration, which the paper does not have."
)
SYSTEMS = (
    "sglang-hicache",
    "vllm-lmcache",
    "trt-llm-hicache",
    "schedule-only",
    "strata-io",
    "strata-io-lpm",
    "strata",
    "ours",
)
PAPER = {"schedule-only": 1.8, "strata-io": 2.3, "strata": 2.9}
ALLOWED = 0.15


def draw(study: Study) -> Drawing:
    """The curves, the peaks, and the paper's ratios of these."""
    swept = sweep(study, {system: Case("h200", "qwen2.5-14b", system, "loogle") for system in SYSTEMS})
    peaks = [bar(name, one.peak) for name, one in swept.items()]
    base = swept["sglang-hicache"]
    return Drawing(
        [
            curve_panel("qwen2.5-14b, loogle", swept),
            Panel("peak", "", "output tokens per second", [Series("peak", peaks)], Form.BARS),
        ],
        [
            peak_comparison(f"peak of {name} over sglang-hicache", base, swept[name], paper, ALLOWED)
            for name, paper in PAPER.items()
        ],
    )
