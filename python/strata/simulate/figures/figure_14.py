"""Figure 14: a link six times as fast, with and without the software to use it."""

from __future__ import annotations

from strata.simulate.figures.drawing import Drawing
from strata.simulate.figures.study import Case, Study
from strata.simulate.figures.sweeps import at_equal_ttft, curve_panel, sweep

CAPTION = (
    "The paper draws mean TTFT against throughput for Llama-3.1-8B and LooGLE on an H200 (PCIe) and a GH200: faster "
    "hardware alone leaves SGLang-HiCache behind Strata-IO on PCIe, Strata-IO on GH200 behind Strata on PCIe, and "
    "Strata on GH200 comes close to an oracle of infinite bandwidth. The oracle here is this repository's scheduler on "
    "a GH200. That Strata-IO on GH200 beats it on PCIe has no number in the paper."
)
SYSTEMS = ("sglang-hicache", "strata-io", "strata")
HARDWARE = {"h200": "PCIe", "gh200": "GH"}


def cases() -> dict[str, Case]:
    """Each system on each machine, and the oracle."""
    pairs = [(system, hardware) for hardware in HARDWARE for system in SYSTEMS]
    named = {
        f"{system} {HARDWARE[hardware]}": Case(hardware, "llama-3.1-8b", system, "loogle")
        for system, hardware in [*pairs, ("oracle", "gh200")]
    }
    return named


def draw(study: Study) -> Drawing:
    """The curves, and in words how they stand to each other."""
    swept = sweep(study, cases())
    statements = [
        ("sglang-hicache GH", "strata-io PCIe"),
        ("strata-io GH", "strata PCIe"),
        ("strata GH", "oracle GH"),
    ]
    remarks = []
    for base, other in statements:
        ratio, where = at_equal_ttft(swept[base], swept[other])
        shown = "none" if ratio is None else str(ratio)
        remarks.append(f"{other} over {base} at equal mean TTFT: {shown} ({where})")
    return Drawing([curve_panel("llama-3.1-8b, loogle", swept)], [], remarks)
