"""Figure 2, a sketch: larger pages find less in the cache, so TTFT grows."""

from __future__ import annotations

from strata.simulate.figures.drawing import Drawing, Form, Panel, Series, bar
from strata.simulate.figures.study import Case, Study, estimate, hit_rate
from strata.simulate.figures.sweeps import rate_of

CAPTION = (
    "The paper varies SGLang's page from 1 to 512 tokens for Mistral-24B and ShareGPT on an H200: the hit rate falls, "
    "mean and P90 TTFT rise by up to 2 and 2.9 times. The rate is not stated: here it is four fifths of what the "
    "smallest page sustains. Only the shape is meant: ShareGPT's lengths are laws here, so what a page cuts off is too."
)
PAGES = (1, 4, 16, 64, 256, 512)
LOAD = 0.8


def draw(study: Study) -> Drawing:
    """Hit rate and TTFT by page size."""
    pages = PAGES[2:] if study.quick else PAGES
    base = Case("h200", "mistral-24b", "no-hierarchy", "sharegpt", {"system": {"page_size": pages[0]}})
    sustained = estimate(study.reports([base])[0], lambda one: one["requests_per_s"]).mean
    rate = rate_of(study.config(base, study.seeds[0])["workload"], LOAD * sustained)
    cases = [base.but({"system": {"page_size": page}, "workload": {"rate": rate}}) for page in pages]
    found = list(zip((str(page) for page in pages), study.reports(cases), strict=True))
    hits = [bar(page, estimate(reports, hit_rate)) for page, reports in found]
    mean = [bar(page, estimate(reports, lambda one: one["ttft"]["mean"])) for page, reports in found]
    tail = [bar(page, estimate(reports, lambda one: one["ttft"]["p90"])) for page, reports in found]
    return Drawing(
        [
            Panel(
                "hit rate", "page (tokens)", "share of prompt tokens", [Series("hit rate", hits)], Form.BARS
            ),
            Panel("TTFT", "page (tokens)", "seconds", [Series("mean", mean), Series("P90", tail)], Form.BARS),
        ]
    )
