"""Figure 3, calibration: how long it takes to load the KV of 8,192 tokens, and what that is of the link's bandwidth.

The load is simulated, but its time is the constants' own: operations, one after the other, and bytes.
"""

from __future__ import annotations

from collections.abc import Callable

from strata.simulate.figures.drawing import Comparison, Drawing, Estimate, Form, Panel, Series, bar
from strata.simulate.figures.study import Case, Study, estimate, plain

CAPTION = (
    "Calibration: follows from the constants. The paper loads 8,192 tokens of Llama-3.1-8B in pages of 32 and "
    "reaches about 22 % of PCIe 5.0's bandwidth with copies per piece, 5 % of Grace Hopper's. The other ways of "
    "copying stand beside it here; PCIe 3 and 4, which the paper draws too, are no hardware of the table. The "
    "link's bandwidth is that of a large copy: `to_device` of `piece`."
)
TOKENS = 8192
PAGE = 32
HARDWARE = ("h200", "gh200")
METHODS = ("piece", "kernel", "batched")
PAPER = {"h200": 0.22, "gh200": 0.05}


def load_case(hardware: str, method: str) -> Case:
    """One question about a context that only the host holds."""
    lengths = {"context_tokens": TOKENS, "question_tokens": PAGE}
    laws = {name: {"mean": mean, "sigma": 0.0} for name, mean in lengths.items()}
    overrides = {
        "warm": True,
        "system": {"copy": method, "page_size": PAGE},
        "workload": {"contexts": 1, "queries": 1, **laws},
    }
    return Case(hardware, "llama-3.1-8b", "sglang-hicache", "loogle", overrides)


def draw(study: Study) -> Drawing:
    """Seconds and share of the bandwidth, by machine and way of copying."""
    pairs = [(hardware, method) for hardware in HARDWARE for method in METHODS]
    reports = study.reports(load_case(*pair) for pair in pairs)
    seconds = {
        pair: estimate(of_pair, lambda one: one["link_busy_s"][0])
        for pair, of_pair in zip(pairs, reports, strict=True)
    }
    loaded = TOKENS * study.token_bytes(load_case(*pairs[0]))
    link = {name: plain(study.table["hardware"][name])["copies"]["piece"]["to_device"] for name in HARDWARE}
    shares = {
        (name, method): Estimate(
            *(loaded / link[name] / value for value in (took.mean, took.most, took.least))
        )
        for (name, method), took in seconds.items()
    }

    def panel(title: str, unit: str, value: Callable[[str, str], Estimate]) -> Panel:
        series = [Series(name, [bar(method, value(name, method)) for method in METHODS]) for name in HARDWARE]
        return Panel(title, "way of copying", unit, series, Form.BARS)

    return Drawing(
        [
            panel(f"loading {TOKENS} tokens in pages of {PAGE}", "seconds", lambda *pair: seconds[pair]),
            panel("of the link's bandwidth", "share", lambda *pair: shares[pair]),
        ],
        [
            Comparison(f"share of the bandwidth, per piece, {name}", paper, shares[name, "piece"])
            for name, paper in PAPER.items()
        ],
    )
