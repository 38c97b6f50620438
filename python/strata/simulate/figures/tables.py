"""A figure as tables and as JSON: every point with its interval, and the paper's numbers beside ours."""

from __future__ import annotations

from typing import Any

from rich.table import Table

import strata
from strata.bench.report import table_of
from strata.simulate.figures.drawing import INTERVAL, Comparison, Drawing, Form, Panel
from strata.simulate.figures.registry import Figure, Kind
from strata.simulate.figures.study import Study

LABELS = {
    Kind.MEASURED: "simulated",
    Kind.CALIBRATION: "calibration: follows from the constants",
    Kind.SKETCH: "qualitative sketch: only the shape is meant",
}


def heading(figure: Figure, study: Study) -> str:
    """One line that says what this is, and what not."""
    quick = "; QUICK: few requests, the numbers mean nothing" if study.quick else ""
    return f"{figure.heading} ({LABELS[figure.kind]}{quick})"


def tables_of(drawing: Drawing) -> list[Table]:
    """A table a panel, and one of the comparisons."""
    tables = [_panel(panel) for panel in drawing.panels]
    if drawing.comparisons:
        rows = [_comparison(one) for one in drawing.comparisons]
        tables.append(table_of("beside the paper", ("what", "here", "paper", "within", "remark"), rows))
    return tables


def _panel(panel: Panel) -> Table:
    if panel.form is Form.GRID:
        return _grid(panel)
    bars = panel.form is Form.BARS
    columns = (
        ("", panel.x_label or "what", panel.y_label) if bars else ("", panel.x_label, panel.y_label, "at")
    )
    rows = [
        (series.name, point.label, str(point.y))
        if bars
        else (series.name, str(point.x), str(point.y), point.label)
        for series in panel.series
        for point in series.points
    ]
    return table_of(panel.title, columns, rows)


def _grid(panel: Panel) -> Table:
    labels = panel.labels
    values = {series.name: {point.label: str(point.y) for point in series.points} for series in panel.series}
    rows = [(name, *(of.get(label, "-") for label in labels)) for name, of in values.items()]
    return table_of(f"{panel.title}: {panel.y_label}", (panel.x_label, *labels), rows)


def _comparison(one: Comparison) -> tuple[str, ...]:
    within = "" if one.holds is None else f"{'yes' if one.holds else 'NO'} (+-{one.allowed:.3g})"
    value = "none" if one.value is None else str(one.value)
    return (one.name, value, f"{one.paper:.4g}", within, one.remark)


def json_of(figure: Figure, drawing: Drawing, study: Study) -> dict[str, Any]:
    """The whole figure, with what somebody needs to draw it again."""
    return {
        "figure": figure.number,
        "title": figure.title,
        "kind": figure.kind.value,
        "caption": figure.caption,
        "panels": [panel.as_json() for panel in drawing.panels],
        "comparisons": [comparison.as_json() for comparison in drawing.comparisons],
        "remarks": drawing.remarks,
        "manifest": {
            "program": f"python -m strata.simulate --figure {figure.number}",
            "version": strata.__version__,
            "seeds": list(study.seeds),
            "interval": INTERVAL,
            "quick": study.quick,
            "least_page_tokens": study.page_tokens,
            "selection": study.selection,
            "simulations": study.runs,
            "configurations_sha256": study.config_digest(),
            "constants_sha256": study.table_digest(),
        },
    }
