"""Runs of several variants of a server under equal load, compared: medians over the seeds with least and most, and for
each seed the ratio to the variant that all are compared with. As JSON, as tables and as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

from strata.bench.load.measures import Figures, across_seeds
from strata.bench.report import Bound, table_of

THROUGHPUT = "output_tokens_per_s"
TTFTS = ("ttft_s_mean", "ttft_s_p50", "ttft_s_p90")
RATIOS = (THROUGHPUT, *TTFTS)
SPEED_UP = 1.2
COUNTERS = {
    "deferrals": "deferrals",
    "set_aside": "set_aside_rounds",
    "taken_over": "taken_over_requests",
    "early_loads": "early_loads",
    "preemptions": "preemptions",
    "recomputed_tokens": "recomputed_tokens_host",
    "loaded_bytes": "load_bytes",
    "load_busy_ns": "load_busy_ns",
    "load_stall_ns": "load_stall_ns",
    "plans": "plans",
}
"""Figure -> the server's counter, by how much it grew in a run. The stall is time for which a step waited for KV."""
Spread = dict[str, float]


@dataclass(frozen=True)
class Variant:
    """A server by its policy and the part of it that is off, if one is."""

    name: str
    policy: str
    off: str = ""


@dataclass
class Stage:
    """The runs of variants that took turns. `results` are those of `bench serve`, by variant."""

    name: str
    baseline: str
    variants: Sequence[Variant]
    results: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def add(self, variant: Variant, result: Mapping[str, Any]) -> None:
        """One run, whose figures get the server's counters too."""
        counted = {name: result["server_stats"].get(counter, 0.0) for name, counter in COUNTERS.items()}
        figures = {**result["figures"], **counted}
        self.results.setdefault(variant.name, []).append({**result, "figures": figures})

    @property
    def rates(self) -> list[float]:
        """In the order in which they were run."""
        return list(dict.fromkeys(run["rate"] for runs in self.results.values() for run in runs))

    def figures(self, variant: str, rate: float) -> dict[int, Figures]:
        """Of each seed."""
        runs = self.results.get(variant, [])
        return {run["seed"]: run["figures"] for run in runs if run["rate"] == rate}

    def ratios(self, variant: str, rate: float) -> dict[str, Spread]:
        """Over the baseline's run of the same seed; nothing for the baseline."""
        ours, theirs = self.figures(variant, rate), self.figures(self.baseline, rate)
        pairs = [(ours[seed], theirs[seed]) for seed in ours if seed in theirs]
        if variant == self.baseline or not pairs:
            return {}
        return across_seeds(
            [
                {name: one[name] / other[name] for name in RATIOS if one.get(name) and other.get(name)}
                for one, other in pairs
            ]
        )

    def rows(self) -> Iterator[tuple[float, str, dict[str, Spread], dict[str, Spread]]]:
        """Rate, variant, figures, ratios."""
        for rate in self.rates:
            for variant in self.variants:
                found = self.figures(variant.name, rate)
                if found:
                    ratios = self.ratios(variant.name, rate)
                    yield rate, variant.name, across_seeds([*found.values()]), ratios


def bounds_of(stage: Stage) -> list[Bound]:
    """What is promised of `adaptive` beside `fcfs`, if both were run."""
    if stage.baseline != "fcfs" or not stage.results.get("adaptive"):
        return []
    found = []
    for rate in stage.rates:
        ratios = stage.ratios("adaptive", rate)
        if "ttft_s_p90" in ratios:
            rule = "adaptive / fcfs, median over the seeds"
            found.append(Bound(f"P90 TTFT at {rate:g}/s", ratios["ttft_s_p90"]["median"], 1.0, "x", rule))
        if rate == max(stage.rates) and THROUGHPUT in ratios:
            slower = 1 / ratios[THROUGHPUT]["median"]
            rule = f"fcfs / adaptive at the greatest rate: {SPEED_UP:g} times as many"
            found.append(Bound(f"output tokens/s at {rate:g}/s", slower, 1 / SPEED_UP, "x", rule))
    return found


def stage_as_json(stage: Stage) -> dict[str, Any]:
    """Everything of a stage, single runs included."""
    return {
        "name": stage.name,
        "baseline": stage.baseline,
        "variants": [vars(variant) for variant in stage.variants],
        "comparison": [
            {"rate": rate, "variant": variant, "figures": figures, "ratios": ratios}
            for rate, variant, figures, ratios in stage.rows()
        ],
        "runs": [{"variant": variant, **run} for variant, runs in stage.results.items() for run in runs],
    }


_SHOWN = (
    ("output tokens/s", THROUGHPUT, 1.0, "{:.1f}"),
    ("TTFT mean, s", "ttft_s_mean", 1.0, "{:.2f}"),
    ("P50", "ttft_s_p50", 1.0, "{:.2f}"),
    ("P90", "ttft_s_p90", 1.0, "{:.2f}"),
    ("gap P99, s", "token_gap_s_p99", 1.0, "{:.2f}"),
)
_RATIOS_SHOWN = (
    ("tokens/s ratio", THROUGHPUT),
    ("mean TTFT ratio", "ttft_s_mean"),
    ("P90 TTFT ratio", "ttft_s_p90"),
)
_COUNTED = (
    ("device", "tokens_device", 1.0, "{:,.0f}"),
    ("host", "tokens_host", 1.0, "{:,.0f}"),
    ("computed", "tokens_computed", 1.0, "{:,.0f}"),
    ("MB loaded", "loaded_bytes", 1e-6, "{:,.0f}"),
    ("run, s", "seconds", 1.0, "{:.1f}"),
    ("link busy, s", "load_busy_ns", 1e-9, "{:.1f}"),
    ("stall, s", "load_stall_ns", 1e-9, "{:.1f}"),
    ("deferrals", "deferrals", 1.0, "{:.0f}"),
    ("set aside", "set_aside", 1.0, "{:.0f}"),
    ("early loads", "early_loads", 1.0, "{:.0f}"),
)
_TIMES = ("rate", "variant", *(title for title, *_ in (*_SHOWN, *_RATIOS_SHOWN)))
_COUNTS = ("rate", "variant", *(title for title, *_ in _COUNTED))


def _times(stage: Stage) -> list[list[str]]:
    return [
        [
            f"{rate:g}",
            variant,
            *(_cell(figures.get(name), scale, form) for _, name, scale, form in _SHOWN),
            *(_cell(ratios.get(name), 1.0, "{:.2f}") for _, name in _RATIOS_SHOWN),
        ]
        for rate, variant, figures, ratios in stage.rows()
    ]


def _counts(stage: Stage) -> list[list[str]]:
    return [
        [
            f"{rate:g}",
            variant,
            *(_middle(figures.get(name), scale, form) for _, name, scale, form in _COUNTED),
        ]
        for rate, variant, figures, _ in stage.rows()
    ]


def _cell(spread: Spread | None, scale: float, form: str) -> str:
    if spread is None:
        return "-"
    middle, least, most = (form.format(spread[kind] * scale) for kind in ("median", "least", "most"))
    return middle if least == most else f"{middle} ({least}..{most})"


def _middle(spread: Spread | None, scale: float, form: str) -> str:
    return "-" if spread is None else form.format(spread["median"] * scale)


def _titles(stage: Stage) -> tuple[str, str]:
    return (
        f"{stage.name}: medians over the seeds (least..most), ratios to {stage.baseline}",
        f"{stage.name}: prompt tokens by source and the server's counters, medians of a run",
    )


def tables_of(stage: Stage) -> list[Table]:
    """A stage for people."""
    times, counts = _titles(stage)
    return [table_of(times, _TIMES, _times(stage)), table_of(counts, _COUNTS, _counts(stage))]


def markdown_of(stages: Sequence[Stage]) -> str:
    """All stages for a page of the documentation."""
    parts = []
    for stage in stages:
        times, counts = _titles(stage)
        parts += [f"**{times}**\n\n{_markdown(_TIMES, _times(stage))}"]
        parts += [f"**{counts}**\n\n{_markdown(_COUNTS, _counts(stage))}"]
    return "\n\n".join(parts) + "\n"


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    ruler = ["---", "---", *("---:" for _ in columns[2:])]
    return "\n".join("| " + " | ".join(line) + " |" for line in (columns, ruler, *rows))
