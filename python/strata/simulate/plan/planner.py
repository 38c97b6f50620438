"""A plan from a question: the grid, the simulations, the answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from strata.errors import ConfigError
from strata.simulate.plan.outcome import Monotony, Outcome, cheapest, fastest, frontier, monotony
from strata.simulate.plan.prices import NAMES, Prices
from strata.simulate.plan.search import Laboratory, Limit, Run, described, limit_of, refine, token_bytes
from strata.simulate.plan.tiers import DISK_PARTS, HOST_PARTS, Grid, parts_of, rounded
from strata.simulate.workloads import distinct_tokens


@dataclass(frozen=True)
class Question:
    """What is asked: `config` is a simulation (its sizes do not matter), `target_s` the P99 of the TTFT in seconds.
    Sizes in bytes; None: from the workload (hosts and disks), or the hardware's (devices)."""

    config: Mapping[str, Any]
    target_s: float
    prices: Prices
    devices: tuple[int, ...] | None = None
    hosts: tuple[int, ...] | None = None
    disks: tuple[int, ...] | None = None
    resolution: float = 0.1
    most_runs: int = 80

    def __post_init__(self) -> None:
        if not 0 < self.target_s < math.inf:
            raise ConfigError(
                f"--ttft-p99 {self.target_s:g} is not more than 0 seconds; give seconds such as 2.5"
            )
        if not 0.01 <= self.resolution <= 1:
            raise ConfigError(
                f"--resolution {self.resolution:g} is not between 0.01 and 1; 0.1 ends within a tenth of a size"
            )
        if not self.config["system"]["hierarchy"]:
            raise ConfigError(
                f"--system {self.config['system']['name']} keeps nothing below the device, so no size matters; "
                "choose one that does, such as ours"
            )
        if self.devices is not None and len(self.devices) > 1 and not self.prices.per_gib["device"]:
            raise ConfigError(
                f"--device-memory names {len(self.devices)} sizes, and a device's GiB costs 0: the largest would "
                "always win; give a price with --price-per-gib device=..."
            )
        if self.disks and max(self.disks) and not self.config["hardware"].get("disk"):
            raise ConfigError(
                f"--disk names sizes, and hardware {self.config['hardware']['name']!r} has no disk; leave --disk out, "
                "or give a hardware file with one"
            )


@dataclass(frozen=True)
class Plan:
    """The answer. `best` is None where no size meets the target; then `limit` says why. `everything`: bytes on one
    device's host that hold all that the workload ever needs."""

    question: Question
    grid: Grid
    everything: int
    outcomes: tuple[Outcome, ...]
    best: Outcome | None
    frontier: tuple[Outcome, ...]
    monotony: Monotony
    limit: Limit | None

    @property
    def fastest(self) -> Outcome:
        """The lowest P99 of all."""
        return fastest(self.outcomes)

    def as_json(self) -> dict[str, Any]:
        """Everything, for programs; sizes in bytes, times in seconds."""
        prices = self.question.prices
        return {
            "target_ttft_p99_s": self.question.target_s,
            "everything_bytes": self.everything,
            "currency": prices.currency,
            "devices": prices.devices,
            "prices_per_gib": {
                name: {"value": prices.per_gib[name], "source": prices.sources[name]} for name in NAMES
            },
            "best": None if self.best is None else described(self.best),
            "fastest": described(self.fastest),
            "limit": None if self.limit is None else self.limit.reason(self.question.target_s),
            "frontier": [described(outcome) for outcome in self.frontier],
            "outcomes": [described(outcome) for outcome in self.outcomes],
            "monotony": {
                "pairs": self.monotony.pairs,
                "slower_with_more": self.monotony.worse,
                "worst": [described(outcome) for outcome in self.monotony.worst or ()],
            },
        }


def plan(
    question: Question,
    run: Run,
    at_once: int = 2,
    tell: Callable[[int, int], None] = lambda done, planned: None,
) -> Plan:
    """Simulates the grid, refines around the cheapest that meets the target, and says what was found. `tell` hears of
    progress: simulations done, and planned so far. Raises ConfigError."""
    config = question.config
    # A tenth more: pages are whole, and a tier that is full to the last page evicts.
    everything = rounded(1.1 * distinct_tokens(config["workload"]) * token_bytes(config, run))
    has_disk = bool(config["hardware"].get("disk"))
    grid = Grid(
        question.devices or (int(config["hardware"]["device_bytes"]),),
        question.hosts or parts_of(everything, HOST_PARTS),
        question.disks or (parts_of(everything, DISK_PARTS) if has_disk else (0,)),
    )
    laboratory = Laboratory(config, question.prices, run, at_once, tell)
    laboratory.simulate(grid.points())
    refine(laboratory, grid, question.target_s, question.resolution, question.most_runs)
    best = cheapest(laboratory.outcomes.values(), question.target_s)
    limit = None if best is not None else limit_of(laboratory, everything)
    outcomes = tuple(
        sorted(
            laboratory.outcomes.values(), key=lambda outcome: (outcome.cost, outcome.ttft_p99, outcome.tiers)
        )
    )
    return Plan(
        question, grid, everything, outcomes, best, tuple(frontier(outcomes)), monotony(outcomes), limit
    )
