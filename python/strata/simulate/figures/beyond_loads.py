"""The loads under which our scheduler is held against the published one and an oracle: names, conditions, rates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from strata.simulate.figures import figure_08, figure_13
from strata.simulate.figures.study import Case, Overrides, Study

MODELS = ("llama-3.1-8b", "qwen2.5-14b", "deepseek-v3")
TOOL_AGENT_REQUESTS = 2000
DISK_QUESTIONS = 600
AT_ONCE = 1000.0
"""Agents per second that are as good as all at once."""


@dataclass(frozen=True)
class Load:
    """One load by its name."""

    name: str
    model: str
    workload: str
    order: str = ""


LOADS = (
    Load("loogle-8b", "llama-3.1-8b", "loogle"),
    Load("loogle-14b", "qwen2.5-14b", "loogle"),
    Load("loogle-minimum", "qwen2.5-14b", "loogle", "minimum"),
    Load("loogle-maximum", "qwen2.5-14b", "loogle", "maximum"),
    Load("narrativeqa", "llama-3.1-8b", "narrativeqa"),
    Load("reviewmt", "llama-3.1-8b", "reviewmt"),
    Load("sharegpt", "llama-3.1-8b", "sharegpt"),
    Load("tool-agent", "llama-3.1-8b", "tool-agent"),
    Load("disk", "deepseek-v3", "loogle"),
)
EXPLANATION = (
    "LooGLE starts cold, in an order by chance, with all questions about a context in a row (minimum), or with one "
    "about each in turn (maximum), on an H200; NarrativeQA starts with every context in host memory; ShareGPT's device "
    "has room for 500K tokens; tool-agent is the generator that stands for the trace; disk is figure 13's set-up with "
    "600 questions."
)


def selected(study: Study) -> list[Load]:
    """Those loads that the study is limited to. Raises ConfigError for names that there are not."""
    names = study.selected("workloads", [load.name for load in LOADS])
    models = study.selected("models", MODELS)
    return [load for load in LOADS if load.name in names and load.model in models]


def cases_of(study: Study, load: Load, systems: Sequence[str]) -> dict[str, Case]:
    """The load under each system, all requests at once."""
    if load.name == "disk":
        _, page_first = figure_13.cases(study)
        at_once: Overrides = {"workload": {"rate": None, "queries": DISK_QUESTIONS}}
        return {name: _under(name, page_first).but(at_once) for name in systems}
    if load.workload in ("narrativeqa", "sharegpt"):
        of_figure = figure_08.cases_of(study, load.model, load.workload)
        return {name: _under(name, of_figure["strata"]) for name in systems}
    overrides: Overrides = {}
    if load.order:
        overrides = {"workload": {"order": load.order}}
    if load.workload == "tool-agent":
        overrides = {"workload": {"agents_per_second": AT_ONCE, "requests": TOOL_AGENT_REQUESTS}}
    return {name: Case("h200", load.model, name, load.workload, overrides) for name in systems}


def _under(system: str, case: Case) -> Case:
    return Case(case.hardware, case.model, system, case.workload, case.overrides)
