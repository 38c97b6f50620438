"""Figure 8: throughput against mean TTFT of whole systems, for each model and data set; ratios at equal mean TTFT."""

from __future__ import annotations

from strata.simulate.figures.drawing import Comparison, Drawing, Panel
from strata.simulate.figures.study import Case, Overrides, Study
from strata.simulate.figures.sweeps import curve_panel, equal_ttft_comparison, sweep

CAPTION = (
    "The paper sweeps the request rate on an H200 (70B: four, tensor parallel) with at most 128 requests in flight. "
    "NarrativeQA starts with every context in host memory and an empty device, without TRT-LLM, which cannot be "
    "warmed; the others start empty. ShareGPT's device has room for 500K tokens. `no-hierarchy` stands for plain "
    "SGLang; plain vLLM and TRT-LLM are left out: without a hierarchy they differ by what is not modelled here."
)
MODELS = ("llama-3.1-8b", "qwen2.5-14b", "llama-3.1-70b")
WORKLOADS = ("loogle", "narrativeqa", "reviewmt", "sharegpt")
SYSTEMS = ("no-hierarchy", "sglang-hicache", "vllm-lmcache", "trt-llm-hicache", "strata", "ours")
WARM_SYSTEMS = ("sglang-hicache", "vllm-lmcache", "strata", "ours")
SHAREGPT_TOKENS = 500_000

PAPER: dict[tuple[str, str], dict[str, float]] = {
    ("llama-3.1-8b", "loogle"): {"sglang-hicache": 3.2, "vllm-lmcache": 2.6, "trt-llm-hicache": 1.9},
    ("qwen2.5-14b", "loogle"): {"sglang-hicache": 3.9, "vllm-lmcache": 2.1, "trt-llm-hicache": 1.9},
    ("llama-3.1-70b", "loogle"): {"sglang-hicache": 5.0, "vllm-lmcache": 5.0, "trt-llm-hicache": 3.75},
    ("llama-3.1-8b", "reviewmt"): {"sglang-hicache": 1.7, "vllm-lmcache": 2.3, "trt-llm-hicache": 2.3},
    ("llama-3.1-8b", "narrativeqa"): {"vllm-lmcache": 2.3},
    ("qwen2.5-14b", "narrativeqa"): {"vllm-lmcache": 2.6},
    ("llama-3.1-70b", "narrativeqa"): {"vllm-lmcache": 2.5},
}
ASKED_FOR = {("llama-3.1-8b", "loogle", "sglang-hicache"), ("qwen2.5-14b", "loogle", "sglang-hicache")}
ALLOWED = 0.2


def draw(study: Study) -> Drawing:
    """A panel for each model and data set that the study selects."""
    panels: list[Panel] = []
    comparisons: list[Comparison] = []
    for model in study.selected("models", MODELS):
        for workload in study.selected("workloads", WORKLOADS):
            swept = sweep(study, cases_of(study, model, workload))
            panels.append(curve_panel(f"{model}, {workload}", swept))
            for base, paper in PAPER.get((model, workload), {}).items():
                allowed = ALLOWED if (model, workload, base) in ASKED_FOR else None
                name = f"{model}, {workload}: strata over {base}"
                comparisons.append(equal_ttft_comparison(name, swept[base], swept["strata"], paper, allowed))
    return Drawing(panels, comparisons)


def cases_of(study: Study, model: str, workload: str) -> dict[str, Case]:
    """The systems of one panel under its conditions."""
    systems = WARM_SYSTEMS if workload == "narrativeqa" else SYSTEMS
    cases = {system: Case("h200", model, system, workload) for system in systems}
    conditions: Overrides = {}
    if workload == "narrativeqa":
        conditions = {"warm": True}
    if workload == "sharegpt":
        room = study.device_bytes(cases[systems[0]], SHAREGPT_TOKENS)
        conditions = {"hardware": {"device_bytes": room}}
    return {system: case.but(conditions) for system, case in cases.items()}
