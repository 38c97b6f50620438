"""A figure as a picture: its panels side by side, the seeds' least and most as bars of error, the caption below."""

from __future__ import annotations

import math
import textwrap
from pathlib import Path
from typing import Any

from strata.bench.load.plot import figure_class
from strata.errors import ConfigError
from strata.simulate.figures.drawing import Drawing, Estimate, Form, Panel

MOST_COLUMNS = 4
PANEL_INCHES = (5.0, 4.0)


def draw(drawing: Drawing, heading: str, caption: str, where: Path) -> None:
    """Writes the picture. Raises ConfigError if the file cannot be written."""
    columns = min(MOST_COLUMNS, len(drawing.panels))
    rows = math.ceil(len(drawing.panels) / columns)
    text = textwrap.fill(caption, 46 * columns)
    height = PANEL_INCHES[1] * rows + 0.17 * (text.count("\n") + 3)
    picture = figure_class()(figsize=(PANEL_INCHES[0] * columns, height), layout="constrained")
    axes = picture.subplots(rows, columns, squeeze=False).flat
    for panel, of_panel in zip(drawing.panels, axes, strict=False):
        _panel(of_panel, panel)
    for unused in list(axes)[len(drawing.panels) :]:
        unused.set_axis_off()
    picture.suptitle(textwrap.fill(heading, 42 * columns))
    picture.supxlabel(text, fontsize="small")
    try:
        picture.savefig(where)
    except OSError as error:
        raise ConfigError(f"--plot {where} cannot be written: {error}; give another file") from error


def _panel(axes: Any, panel: Panel) -> None:
    axes.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
    if panel.form in (Form.BARS, Form.GRID):
        _bars(axes, panel)
    else:
        for series in panel.series:
            x, y = [point.x for point in series.points], [point.y for point in series.points]
            style = "steps-post" if panel.form is Form.STEPS else "default"
            axes.errorbar(
                *([one.mean for one in values] for values in (x, y)),
                xerr=_spread(x),
                yerr=_spread(y),
                marker="o",
                markersize=4,
                drawstyle=style,
                label=series.name,
            )
    if panel.x_log:
        axes.set_xscale("log")
    if panel.y_log:
        axes.set_yscale("log")
    if len(panel.series) > 1:
        axes.legend(fontsize="small")


def _bars(axes: Any, panel: Panel) -> None:
    labels = panel.labels
    width = 0.8 / len(panel.series)
    for index, series in enumerate(panel.series):
        values = [point.y for point in series.points]
        middle = width * (index - (len(panel.series) - 1) / 2)
        places = [labels.index(point.label) + middle for point in series.points]
        heights = [value.mean for value in values]
        axes.bar(places, heights, width, yerr=_spread(values), label=series.name, capsize=2)
    axes.set_xticks(range(len(labels)), labels, rotation=30 if len(labels) > 4 else 0, fontsize="small")


def _spread(values: list[Estimate]) -> list[list[float]]:
    return [[value.mean - value.least for value in values], [value.most - value.mean for value in values]]
