"""The search: every size of a grid, then sizes half-way between those that meet the target and those that do not.

Only cost is taken to rise with size, which it does by its definition. That a larger tier is never slower is checked on
every pair that was simulated, not assumed: what is recommended was itself simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from strata.simulate.plan.outcome import Outcome, cheapest, fastest, outcome_of
from strata.simulate.plan.prices import Prices
from strata.simulate.plan.tiers import Grid, Tiers, between
from strata.simulate.report import Report

Run = Callable[[Sequence[Mapping[str, Any]]], Sequence[Report]]
"""Runs simulations, in order."""


@dataclass
class Laboratory:
    """Simulates each combination of sizes once. `config` is a simulation whose sizes are changed."""

    config: Mapping[str, Any]
    prices: Prices
    run: Run
    at_once: int = 2
    tell: Callable[[int, int], None] = lambda done, planned: None
    outcomes: dict[Tiers, Outcome] = field(default_factory=dict)

    def simulate(self, wanted: Iterable[Tiers]) -> list[Outcome]:
        """The outcomes of these sizes, in order."""
        asked = list(wanted)
        new = list(dict.fromkeys(tiers for tiers in asked if tiers not in self.outcomes))
        planned = len(self.outcomes) + len(new)
        for start in range(0, len(new), self.at_once):
            batch = new[start : start + self.at_once]
            reports = self.run([self.sized(tiers) for tiers in batch])
            for tiers, report in zip(batch, reports, strict=True):
                self.outcomes[tiers] = outcome_of(tiers, self.prices.cost(tiers), report)
            self.tell(len(self.outcomes), planned)
        return [self.outcomes[tiers] for tiers in asked]

    def sized(self, tiers: Tiers, **system: Any) -> dict[str, Any]:
        """The configuration with these sizes; `system` changes fields of the system."""
        hardware = {
            **self.config["hardware"],
            "device_bytes": float(tiers.device),
            "host_bytes": float(tiers.host),
        }
        if hardware.get("disk"):
            hardware["disk"] = {**hardware["disk"], "bytes": float(tiers.disk)}
        changed = {**self.config["system"], "disk": tiers.disk > 0, **system}
        return {**self.config, "hardware": hardware, "system": changed}

    def without_links(self, tiers: Tiers) -> Outcome:
        """As `simulate`, if links and disk took no time: what is left is computing and its queue."""
        report = self.run([self.sized(tiers, infinite_bandwidth=True)])[0]
        return outcome_of(tiers, self.prices.cost(tiers), report)


def token_bytes(config: Mapping[str, Any], run: Run) -> float:
    """Bytes of one token's KV on one device, as the simulator reckons them."""
    segment = {"id": 0, "tokens": 1}
    tiny = {
        "kind": "explicit",
        "requests": [{"arrival_s": 0.0, "prompt": [segment], "output": 1, "answer": 1}],
    }
    host = float(1 << 42)
    hardware = {**config["hardware"], "host_bytes": host}
    report = run([{**config, "hardware": hardware, "workload": tiny, "warm": False}])[0]
    return host / report["pages"][1] / float(config["system"]["page_size"])


def refine(laboratory: Laboratory, grid: Grid, target_s: float, resolution: float, most_runs: int) -> None:
    """Halves the gaps in which the cheapest may still lie, until each is within `resolution` or so many runs
    are over."""
    while len(laboratory.outcomes) < most_runs:
        best = cheapest(laboratory.outcomes.values(), target_s)
        if best is None:
            return
        gaps = list(dict.fromkeys(_gaps(laboratory.outcomes, grid, best, target_s, resolution)))
        new = [tiers for tiers in gaps if tiers not in laboratory.outcomes]
        if not new:
            return
        # The cheapest first: what meets the target there makes the others needless.
        new.sort(key=laboratory.prices.cost)
        laboratory.simulate(new[: min(laboratory.at_once, most_runs - len(laboratory.outcomes))])


def _gaps(
    outcomes: Mapping[Tiers, Outcome], grid: Grid, best: Outcome, target_s: float, resolution: float
) -> Iterable[Tiers]:
    """Sizes half-way between the smallest that meets the target and the next below it, along the host's axis and the
    disk's, where what lies between may be cheaper than the best."""
    lines: list[tuple[str, list[Outcome]]] = []
    for device in grid.devices:
        for disk in sorted({*grid.disks, best.tiers.disk}):
            lines.append(("host", _line(outcomes, lambda t, d=device, k=disk: t.device == d and t.disk == k)))
        for host in sorted({*grid.hosts, best.tiers.host}):
            lines.append(("disk", _line(outcomes, lambda t, d=device, h=host: t.device == d and t.host == h)))
    for axis, line in lines:
        met = next((place for place, outcome in enumerate(line) if outcome.meets(target_s)), 0)
        if met == 0 or line[met - 1].cost >= best.cost:
            continue
        low, high = line[met - 1].tiers, line[met].tiers
        middle = between(getattr(low, axis), getattr(high, axis), resolution)
        if middle is not None:
            yield Tiers(
                high.device, middle if axis == "host" else high.host, middle if axis == "disk" else high.disk
            )


def _line(outcomes: Mapping[Tiers, Outcome], belongs: Callable[..., bool]) -> list[Outcome]:
    return [outcomes[tiers] for tiers in sorted(outcomes) if belongs(tiers)]


@dataclass(frozen=True)
class Limit:
    """Why no size meets the target: P99 where the host holds everything, and where links cost nothing besides."""

    all_in_host: Outcome
    without_links: Outcome

    def reason(self, target_s: float) -> str:
        """In words, with the number that decides."""
        if self.all_in_host.meets(target_s):
            return (
                f"the sizes: a host of {self.all_in_host.tiers.host >> 30} GiB, which holds everything, meets it with "
                f"{self.all_in_host.ttft_p99:.3f} s; add larger sizes to --host"
            )
        if self.without_links.meets(target_s):
            return (
                f"the links: with a host that holds everything P99 is {self.all_in_host.ttft_p99:.3f} s, and "
                f"{self.without_links.ttft_p99:.3f} s if loading took no time; a faster link helps, memory does not"
            )
        return (
            f"computing: even with a host that holds everything P99 is {self.all_in_host.ttft_p99:.3f} s, and "
            f"{self.without_links.ttft_p99:.3f} s if loading took no time; use more or faster devices, a lower "
            "--rate-scale, or a higher --ttft-p99"
        )


def limit_of(laboratory: Laboratory, everything: int) -> Limit:
    """Simulates the best device that was tried with a host that holds everything."""
    device = fastest(laboratory.outcomes.values()).tiers.device
    tiers = Tiers(device, everything, 0)
    return Limit(laboratory.simulate([tiers])[0], laboratory.without_links(tiers))


def described(outcome: Outcome) -> dict[str, Any]:
    """An outcome as JSON; sizes in bytes."""
    tiers = outcome.tiers
    return {
        "device_bytes": tiers.device,
        "host_bytes": tiers.host,
        "disk_bytes": tiers.disk,
        **{name: value for name, value in vars(outcome).items() if name != "tiers"},
    }
