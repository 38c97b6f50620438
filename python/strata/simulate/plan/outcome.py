"""What simulations of several sizes came to: the cheapest that meets a target, the frontier, and whether more memory
was always better."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from strata.simulate.plan.tiers import Tiers
from strata.simulate.report import Report

NOISE = 0.02
"""Part of a P99 below which two runs count as equal: the scheduler's order changes with every size."""


@dataclass(frozen=True)
class Outcome:
    """One simulation. Seconds are from when a client was ready to submit to its first token; `computed` is the part of
    all prompt tokens that no tier had; `busy` the part of the time in which the device computed."""

    tiers: Tiers
    cost: float
    ttft_p99: float
    ttft_p50: float
    ttft_mean: float
    computed: float
    busy: float
    finished: int
    refused: int

    def meets(self, target_s: float) -> bool:
        """Whether every request was answered, and 99 in 100 in time."""
        return self.refused == 0 and self.ttft_p99 <= target_s


def outcome_of(tiers: Tiers, cost: float, report: Report) -> Outcome:
    """The part of a report that a plan needs."""
    ttft, tokens = report["ttft_from_due"], report["prompt_tokens"]
    prompt = tokens["device"] + tokens["host"] + tokens["disk"] + tokens["computed"]
    return Outcome(
        tiers=tiers,
        cost=cost,
        ttft_p99=ttft["p99"],
        ttft_p50=ttft["p50"],
        ttft_mean=ttft["mean"],
        computed=tokens["computed"] / prompt if prompt else 0.0,
        busy=report["device_busy_share"],
        finished=report["finished"],
        refused=report["refused"],
    )


def cheapest(outcomes: Iterable[Outcome], target_s: float) -> Outcome | None:
    """The cheapest that meets the target; of equal ones the fastest."""
    meeting = [outcome for outcome in outcomes if outcome.meets(target_s)]
    return min(meeting, key=lambda outcome: (outcome.cost, outcome.ttft_p99, outcome.tiers), default=None)


def fastest(outcomes: Iterable[Outcome]) -> Outcome:
    """The one with the lowest P99 among those with the fewest refusals; of equal ones the cheapest."""
    return min(outcomes, key=lambda outcome: (outcome.refused, outcome.ttft_p99, outcome.cost, outcome.tiers))


def frontier(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Those that no other beats in both cost and P99, by cost; runs that refused requests are not among them."""
    best: list[Outcome] = []
    answered = [outcome for outcome in outcomes if outcome.refused == 0]
    for outcome in sorted(answered, key=lambda outcome: (outcome.cost, outcome.ttft_p99, outcome.tiers)):
        if not best or outcome.ttft_p99 < best[-1].ttft_p99:
            best.append(outcome)
    return best


@dataclass(frozen=True)
class Monotony:
    """Of `pairs` whose sizes can be compared, so many in which more memory was slower, and the worst of these."""

    pairs: int
    worse: int
    worst: tuple[Outcome, Outcome] | None


def monotony(outcomes: Sequence[Outcome]) -> Monotony:
    """Checks what one would assume: that no tier does harm by being larger."""
    pairs, worse = 0, []
    for small in outcomes:
        for large in outcomes:
            if small.tiers == large.tiers or not small.tiers.is_within(large.tiers):
                continue
            pairs += 1
            if large.ttft_p99 > small.ttft_p99 * (1 + NOISE) or large.refused > small.refused:
                worse.append((small, large))
    worst = max(worse, key=lambda pair: pair[1].ttft_p99 - pair[0].ttft_p99, default=None)
    return Monotony(pairs, len(worse), worst)
