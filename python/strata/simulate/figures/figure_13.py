"""Figure 13: what the page-first layout brings when pages come from disk."""

from __future__ import annotations

from strata.simulate.figures.drawing import Comparison, Drawing, Estimate, Form, Panel, Series, bar
from strata.simulate.figures.study import Case, Overrides, Study, estimate

CAPTION = (
    "The paper serves DeepSeek-V3 on eight H20 with an NVMe disk of 7 GB/s, pages of 32, 12 requests per second: "
    "page-first over layer-first on disk improves mean TTFT 2.1 times (5.03 to 2.42 s) and throughput 1.3 times "
    "(27.4 to 36.4 output tokens per second). The data set and how much of it fits where are not stated: here it is "
    "LooGLE, of whose contexts the host holds a quarter and the disk all; the device has room for 120K tokens, "
    "about what the weights leave of 96 GiB. Twelve of LooGLE's answers a second would be 187 tokens per second, so "
    "the paper's load is another, or it is saturated."
)
PAGE = 32
REQUESTS_PER_S = 12.0
HOST_PART = 0.25
DEVICE_TOKENS = 120_000
LAYOUTS = ("layer_first", "page_first")


def cases(study: Study) -> list[Case]:
    """The same load over each layout."""
    base = Case("h20", "deepseek-v3", "strata", "loogle", {"system": {"page_size": PAGE, "disk": True}})
    workload = study.config(base, study.seeds[0])["workload"]
    contexts = workload["contexts"] * workload["context_tokens"]["mean"]
    host = HOST_PART * contexts * study.token_bytes(base)
    device = study.device_bytes(base, DEVICE_TOKENS)
    conditions: Overrides = {
        "warm": True,
        "hardware": {"host_bytes": host, "device_bytes": device},
        "workload": {"rate": REQUESTS_PER_S},
    }
    return [base.but({**conditions, "system": {"disk_order": layout}}) for layout in LAYOUTS]


def draw(study: Study) -> Drawing:
    """TTFT and throughput of both layouts."""
    layers, pages = study.reports(cases(study))
    pairs = list(zip(layers, pages, strict=True))
    ttft = [
        bar(name, estimate(one, lambda report: report["ttft"]["mean"]))
        for name, one in zip(LAYOUTS, (layers, pages), strict=True)
    ]
    throughput = [
        bar(name, estimate(one, lambda report: report["output_tokens_per_s"]))
        for name, one in zip(LAYOUTS, (layers, pages), strict=True)
    ]
    return Drawing(
        [
            Panel("mean TTFT", "layout on disk", "seconds", [Series("strata", ttft)], Form.BARS),
            Panel(
                "throughput", "layout on disk", "output tokens/s", [Series("strata", throughput)], Form.BARS
            ),
        ],
        [
            Comparison(
                "mean TTFT, layer-first over page-first",
                2.1,
                Estimate.of([one["ttft"]["mean"] / two["ttft"]["mean"] for one, two in pairs]),
            ),
            Comparison(
                "throughput, page-first over layer-first",
                1.3,
                Estimate.of([two["output_tokens_per_s"] / one["output_tokens_per_s"] for one, two in pairs]),
            ),
        ],
    )
