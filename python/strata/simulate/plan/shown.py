"""A plan as text, Markdown or picture."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from strata.config import format_size
from strata.errors import ConfigError
from strata.simulate.plan.outcome import Outcome
from strata.simulate.plan.planner import Plan
from strata.simulate.plan.prices import NAMES

_COLUMNS = ("host", "disk", "cost", "P99 (s)", "P50 (s)", "computed", "busy", "")


def headline(plan: Plan) -> str:
    """The answer in a sentence or three."""
    target = f"P99 TTFT <= {plan.question.target_s:g} s"
    if plan.best is not None:
        best = plan.best
        return (
            f"cheapest with {target}: {best.tiers}, {_money(plan, best.cost)}; P99 is {best.ttft_p99:.3f} s, mean "
            f"{best.ttft_mean:.3f} s"
        )
    reason = plan.limit.reason(plan.question.target_s) if plan.limit else ""
    fastest = plan.fastest
    refused = f", {fastest.refused} requests refused since they never fit" if fastest.refused else ""
    return (
        f"nothing that was tried meets {target}. The best: {fastest.tiers}, {_money(plan, fastest.cost)}, P99 "
        f"{fastest.ttft_p99:.3f} s{refused}. What limits it is {reason}"
    )


def remarks(plan: Plan) -> list[str]:
    """What a reader should know before he buys."""
    prices = plan.question.prices
    told = [
        f"{name} {prices.per_gib[name]:g} {prices.currency}/GiB ({prices.sources[name]})" for name in NAMES
    ]
    lines = [
        "prices: " + "; ".join(told),
        f"all that the workload ever holds takes {format_size(plan.everything)} beside each of {prices.devices} "
        "device(s); sizes are per device, costs are of all",
    ]
    checked = plan.monotony
    if checked.worst is None:
        lines.append(f"checked: of {checked.pairs} pairs of sizes none is slower with more memory")
    else:
        small, large = checked.worst
        lines.append(
            f"checked: in {checked.worse} of {checked.pairs} pairs of sizes more memory is slower, at most from "
            f"{small.ttft_p99:.3f} s ({small.tiers}) to {large.ttft_p99:.3f} s ({large.tiers}): sizes between those "
            "that were simulated may differ from their neighbours"
        )
    return lines


def _money(plan: Plan, cost: float) -> str:
    return f"{_amount(cost)} {plan.question.prices.currency}"


def _amount(cost: float) -> str:
    return f"{cost:,.0f}" if cost >= 100 or cost == 0 else f"{cost:.3g}"


def _mark(plan: Plan, outcome: Outcome) -> str:
    if outcome == plan.best:
        return "cheapest"
    marks = ["meets"] if outcome.meets(plan.question.target_s) else []
    marks += ["frontier"] if outcome in plan.frontier else []
    return ", ".join(marks)


def rows(plan: Plan) -> tuple[list[str], list[list[str]]]:
    """The table of all simulations, by cost."""
    several = len(plan.grid.devices) > 1
    table = []
    for outcome in plan.outcomes:
        tiers = outcome.tiers
        p99 = f"{outcome.ttft_p99:.3f}" + (f" ({outcome.refused} refused)" if outcome.refused else "")
        table.append(
            [
                *([format_size(tiers.device)] if several else []),
                format_size(tiers.host),
                format_size(tiers.disk),
                _amount(outcome.cost),
                p99,
                f"{outcome.ttft_p50:.3f}",
                f"{outcome.computed:.1%}",
                f"{outcome.busy:.1%}",
                _mark(plan, outcome),
            ]
        )
    return [*(["device"] if several else []), *_COLUMNS], table


def markdown(plan: Plan) -> str:
    """The answer, the remarks and the table."""
    head, table = rows(plan)
    lines = [f"**{headline(plan)}**", "", *(f"- {remark}" for remark in remarks(plan)), "", _line(head)]
    lines.append(_line(["---:"] * (len(head) - 1) + ["---"]))
    return "\n".join([*lines, *map(_line, table)]) + "\n"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def show(console: Console, plan: Plan) -> None:
    """Prints the table, the remarks and the answer."""
    head, lines = rows(plan)
    table = Table()
    for column in head:
        table.add_column(column, justify="left" if column == "" else "right")
    for line in lines:
        table.add_row(*line)
    console.print(table)
    for remark in remarks(plan):
        console.print(remark, highlight=False)
    console.print(headline(plan), style="bold", highlight=False)


def draw(plan: Plan, title: str, where: Path) -> None:
    """Cost against P99: every simulation, the frontier, the target. Raises ConfigError."""
    # An extra: most installations draw nothing.
    figure: Any = importlib.import_module("matplotlib.figure").Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    currency = plan.question.prices.currency
    answered = [outcome for outcome in plan.outcomes if outcome.refused == 0]
    axes.plot([each.cost for each in answered], [each.ttft_p99 for each in answered], "o", alpha=0.35, ms=4)
    axes.step(
        [each.cost for each in plan.frontier],
        [each.ttft_p99 for each in plan.frontier],
        where="post",
        marker="o",
        label="frontier",
    )
    axes.axhline(
        plan.question.target_s, ls="--", lw=1, color="grey", label=f"target {plan.question.target_s:g} s"
    )
    if plan.best is not None:
        best = plan.best
        label = f"host {format_size(best.tiers.host)}, disk {format_size(best.tiers.disk)}"
        axes.plot([best.cost], [best.ttft_p99], "*", ms=14, label=label)
    axes.set(xlabel=f"cost of the tiers ({currency})", ylabel="P99 TTFT (s)", yscale="log", title=title)
    axes.legend()
    try:
        figure.savefig(where)
    except OSError as error:
        raise ConfigError(f"--plot {where} cannot be written: {error}; give another file") from error
