"""Runs what figures select: a case is names out of the table of constants and what the figure sets besides. Every case
runs once for each seed, side by side, and never twice in one study.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from strata.errors import ConfigError
from strata.simulate.figures.drawing import Estimate
from strata.simulate.report import Report
from strata.simulate.run import configure, simulate, simulate_many

Overrides = dict[str, Any]

QUICK_CONTEXTS = 4
"""A quick study has one in so many of the contexts."""
QUICK_REQUESTS = 24
"""And one in so many of the requests."""
PROBE_TIMES = 8
"""A device of so many times the memory shows what a page takes."""
PROBE_REQUESTS: Mapping[str, Mapping[str, int]] = {
    "documents": {"contexts": 1, "queries": 1},
    "conversations": {"sessions": 1, "rounds": 1},
    "tool_agents": {"requests": 1},
}


@dataclass(frozen=True)
class Case:
    """One system under one load, by names; `overrides` is laid over what they stand for."""

    hardware: str
    model: str
    system: str
    workload: str
    overrides: Overrides = field(default_factory=dict)

    def but(self, overrides: Mapping[str, Any]) -> Case:
        """The same with more laid over it."""
        return Case(
            self.hardware, self.model, self.system, self.workload, laid_over(self.overrides, overrides)
        )


def laid_over(below: Mapping[str, Any], above: Mapping[str, Any]) -> Overrides:
    """Two sets of overrides as one; what `above` says goes."""
    whole = dict(below)
    for name, value in above.items():
        under = whole.get(name)
        if isinstance(under, Mapping) and isinstance(value, Mapping):
            whole[name] = laid_over(under, value)
        else:
            whole[name] = value
    return whole


def digest(value: object) -> str:
    """SHA-256 over a JSON value, whatever the order of its fields."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def plain(value: Any) -> Any:
    """A part of the table without units and sources."""
    if isinstance(value, Mapping):
        if "value" in value and "source" in value:
            return plain(value["value"])
        return {name: plain(inner) for name, inner in value.items()}
    return value


class Study:
    """Where figures run. `quick` makes every run small: for tests, and for a first look; its numbers mean nothing.

    `page_tokens` is the least page that is simulated: systems with smaller pages get this one, which costs a hit less
    than a page's tokens and saves most of the time. 1 takes every system as the table has it.
    """

    def __init__(
        self,
        table: Mapping[str, Any],
        seeds: Sequence[int] = (1,),
        workers: int | None = None,
        quick: bool = False,
        page_tokens: int = 16,
        selection: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        if not seeds:
            raise ConfigError("--seeds names no seed; give at least one, as in --seeds 1,2,3")
        self.table = table
        self.seeds = tuple(seeds)
        self.quick = quick
        self.page_tokens = page_tokens
        self.selection = {name: list(chosen) for name, chosen in (selection or {}).items() if chosen}
        self._workers = workers
        self._reports: dict[str, Report] = {}

    @property
    def runs(self) -> int:
        """Simulations that were run."""
        return len(self._reports)

    def selected(self, what: str, known: Sequence[str]) -> list[str]:
        """Those of `known` that the study is limited to; all if it is not. Raises ConfigError for others."""
        chosen = self.selection.get(what, list(known))
        strange = [name for name in chosen if name not in known]
        if strange:
            raise ConfigError(
                f"--{what} {','.join(strange)} is not in this figure: choose of {', '.join(known)}"
            )
        return chosen

    def config_digest(self) -> str:
        """Of every configuration that was run, in whatever order."""
        return digest(sorted(self._reports))

    def table_digest(self) -> str:
        """Of the table's numbers; units, sources and the order of its fields do not count."""
        return digest(plain(self.table))

    def config(self, case: Case, seed: int) -> dict[str, Any]:
        """The configuration of a case as it is run."""
        config = self._named(case, seed)
        return reduced(config) if self.quick else config

    def reports(self, cases: Iterable[Case]) -> list[list[Report]]:
        """For each case, a report for each seed."""
        configs = [[self.config(case, seed) for seed in self.seeds] for case in cases]
        return [[self._reports[digest(one)] for one in row] for row in self._run_all(configs)]

    def device_bytes(self, case: Case, tokens: float) -> float:
        """The device memory with which a case's device has room for so many tokens of KV."""
        config = self._named(case, self.seeds[0])
        pages, per_byte = self._room(config)
        wanted = tokens / config["system"]["page_size"]
        return float(config["hardware"]["device_bytes"] + (wanted - pages) / per_byte)

    def token_bytes(self, case: Case) -> float:
        """Bytes of a token's KV on one device, to within a thousandth of a percent."""
        config = self._named(case, self.seeds[0])
        _, per_byte = self._room(config)
        return float(config["hardware"]["device_share"] / per_byte / config["system"]["page_size"])

    def _named(self, case: Case, seed: int) -> dict[str, Any]:
        overrides = laid_over(case.overrides, {"seed": seed})
        config = configure(case.hardware, case.model, case.system, case.workload, overrides, self.table)
        named_page = "page_size" in case.overrides.get("system", {})
        if config["system"]["page_size"] < self.page_tokens and not named_page:
            config["system"]["page_size"] = self.page_tokens
        return config

    def _run_all(self, configs: list[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
        wanted = {digest(config): config for row in configs for config in row}
        missing = {key: config for key, config in wanted.items() if key not in self._reports}
        found = simulate_many(list(missing.values()), self._workers)
        self._reports.update(zip(missing, found, strict=True))
        return configs

    def _room(self, config: dict[str, Any]) -> tuple[float, float]:
        """Pages of the device, and how many a byte more makes: the smallest of runs knows both."""
        pages = []
        for times in (1, PROBE_TIMES):
            probe: dict[str, Any] = json.loads(json.dumps(config))
            probe["hardware"]["device_bytes"] *= times
            probe["workload"].update(PROBE_REQUESTS[probe["workload"]["kind"]])
            probe.update(warm=False, timeline=False)
            pages.append(simulate(probe)["pages"][0])
        return pages[0], (pages[1] - pages[0]) / (PROBE_TIMES - 1) / config["hardware"]["device_bytes"]


def reduced(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration with few requests."""
    workload = dict(config["workload"])
    parts = {
        "contexts": (QUICK_CONTEXTS, 4),
        "queries": (QUICK_REQUESTS, 8),
        "sessions": (QUICK_REQUESTS, 4),
        "rounds": (QUICK_REQUESTS, 8),
        "requests": (QUICK_REQUESTS, 40),
    }
    for name, (part, least) in parts.items():
        if name in workload:
            workload[name] = min(workload[name], max(least, workload[name] // part))
    return {**config, "workload": workload}


def estimate(reports: Sequence[Report], value: Callable[[Report], float]) -> Estimate:
    """A number of each seed's report as one."""
    return Estimate.of([value(report) for report in reports])


def hit_rate(report: Report) -> float:
    """The part of the prompt tokens that were not computed."""
    tokens = report["prompt_tokens"]
    whole = tokens["device"] + tokens["host"] + tokens["disk"] + tokens["computed"]
    return 1.0 - tokens["computed"] / whole if whole else 0.0
