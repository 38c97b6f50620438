"""The result as a picture: TTFT's distribution at each rate, and output tokens a second over the rates."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from strata.errors import ConfigError

_SUFFIXES = (".png", ".svg", ".pdf")


def check_plot(where: Path) -> None:
    """Raises ConfigError, before the work, if the picture cannot come about."""
    if where.suffix not in _SUFFIXES:
        raise ConfigError(f"--plot {where} must end in one of {', '.join(_SUFFIXES)}")
    if not where.absolute().parent.is_dir():
        raise ConfigError(f"--plot {where}: its folder does not exist; make it, or give another")
    figure_class()


def figure_class() -> Any:
    """Matplotlib's `Figure`, which needs no display. Raises ConfigError if matplotlib is not installed."""
    try:
        # An extra: most installations draw nothing.
        return importlib.import_module("matplotlib.figure").Figure
    except ImportError as error:
        raise ConfigError(
            f"--plot needs matplotlib, which is not installed ({error}); install the extra `plot`: "
            "pip install 'strata-kv[plot]'"
        ) from error


def draw(result: Mapping[str, Any], where: Path) -> None:
    """Draws the result of `bench serve`. Raises ConfigError if the file cannot be written."""
    figure = figure_class()(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for rate in result["rates"]:
        runs = [run for run in result["runs"] if run["rate"] == rate["rate"]]
        times = sorted(
            request["ttft_s"]
            for run in runs
            for request in run["requests"]
            if request["error"] is None and request["ttft_s"] is not None
        )
        if times:
            shares = [(place + 1) / len(times) for place in range(len(times))]
            left.step(times, shares, where="post", label=label_of(rate["rate"]))
    left.set(xlabel="TTFT from arrival (s)", ylabel="share of requests", xscale="log", ylim=(0, 1))
    if left.lines:
        left.legend()
    _draw_rates(right, result["rates"])
    figure.suptitle(f"{result['manifest']['server']['model']}: {result['workload']}")
    try:
        figure.savefig(where)
    except OSError as error:
        raise ConfigError(f"--plot {where} cannot be written: {error}; give another file") from error


def _draw_rates(axes: Any, rates: Sequence[Mapping[str, Any]]) -> None:
    spreads = [rate["figures"]["output_tokens_per_s"] for rate in rates]
    middles = [spread["median"] for spread in spreads]
    errors = [
        [spread["median"] - spread["least"] for spread in spreads],
        [spread["most"] - spread["median"] for spread in spreads],
    ]
    axes.errorbar(range(len(rates)), middles, yerr=errors, marker="o", capsize=4)
    axes.set_xticks(range(len(rates)), [label_of(rate["rate"]) for rate in rates])
    axes.set(xlabel="rate", ylabel="output tokens/s (median, least and most of the seeds)", ylim=(0, None))


def label_of(rate: float | None) -> str:
    """A rate in words."""
    return "the trace's times" if rate is None else f"{rate:g}/s"
