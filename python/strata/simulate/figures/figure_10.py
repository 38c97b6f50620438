"""Figure 10: with copies per piece the page size decides; with the kernel it need not."""

from __future__ import annotations

from strata.simulate.figures.drawing import Comparison, Drawing, Estimate, Form, Panel, Series, bar
from strata.simulate.figures.study import Case, Study, hit_rate

CAPTION = (
    "The paper draws SGLang-HiCache's peak throughput and hit rate over its page size (32 to 1,024 tokens), normalised "
    "to Strata-IO, for Qwen2.5-14B and LooGLE on an H200; its best page, 512, reaches 93 % with a hit rate 2.4 % "
    "lower. Here the peak is the throughput with 128 requests in flight throughout."
)
PAGES = (32, 128, 256, 512, 1024)


def draw(study: Study) -> Drawing:
    """Peak and hit rate by page size, each over strata-io's."""
    base = Case("h200", "qwen2.5-14b", "strata-io", "loogle")
    piece = Case("h200", "qwen2.5-14b", "sglang-hicache", "loogle")
    cases = [base, *(piece.but({"system": {"page_size": page}}) for page in PAGES)]
    reference, *found = study.reports(cases)
    peaks, hits = {}, {}
    for page, reports in zip(PAGES, found, strict=True):
        pairs = list(zip(reports, reference, strict=True))
        peaks[page] = Estimate.of(
            [one["output_tokens_per_s"] / two["output_tokens_per_s"] for one, two in pairs]
        )
        hits[page] = Estimate.of([hit_rate(one) / (hit_rate(two) or 1.0) for one, two in pairs])
    best = max(PAGES, key=lambda page: peaks[page].mean)
    series = [
        Series(name, [bar(str(page), value) for page, value in values.items()])
        for name, values in (("peak throughput", peaks), ("hit rate", hits))
    ]
    return Drawing(
        [Panel("sglang-hicache over strata-io", "page (tokens)", "of strata-io's", series, Form.BARS)],
        [
            Comparison(
                "best peak of sglang-hicache over strata-io", 0.93, peaks[best], remark=f"at a page of {best}"
            ),
            Comparison("hit rate at a page of 512 over strata-io's", 0.976, hits[512]),
        ],
    )
