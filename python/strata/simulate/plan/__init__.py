"""Which tiers to buy for a trace: sizes are simulated, and the cheapest that meets a target is named."""

from strata.simulate.plan.outcome import Monotony, Outcome, cheapest, frontier, monotony
from strata.simulate.plan.planner import Plan, Question, plan
from strata.simulate.plan.prices import Prices, prices_of
from strata.simulate.plan.tiers import Grid, Tiers

__all__ = [
    "Grid",
    "Monotony",
    "Outcome",
    "Plan",
    "Prices",
    "Question",
    "Tiers",
    "cheapest",
    "frontier",
    "monotony",
    "plan",
    "prices_of",
]
