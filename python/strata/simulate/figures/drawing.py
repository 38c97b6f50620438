"""What a figure consists of, before it becomes a table, a picture or JSON: panels of points, each number with what the
seeds made of it, and comparisons with what the paper reports.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

INTERVAL = "mean over the seeds, with the least and the most of them"


@dataclass(frozen=True)
class Estimate:
    """A number: its mean over the seeds, the least and the most of them."""

    mean: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """Of one value a seed, at least one."""
        return cls(statistics.fmean(values), min(values), max(values))

    def __str__(self) -> str:
        if self.least == self.most:
            return f"{self.mean:.4g}"
        return f"{self.mean:.4g} ({self.least:.4g}..{self.most:.4g})"

    def as_json(self) -> dict[str, float]:
        """Mean, least and most."""
        return {"mean": self.mean, "least": self.least, "most": self.most}


@dataclass(frozen=True)
class Point:
    """A point of a series. `label` says what the axes do not: the rate, or the bar's name."""

    x: Estimate
    y: Estimate
    label: str = ""
    more: dict[str, Estimate] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """The point with everything that was measured there."""
        more = {name: value.as_json() for name, value in self.more.items()}
        return {"label": self.label, "x": self.x.as_json(), "y": self.y.as_json(), "more": more}


@dataclass(frozen=True)
class Series:
    """The points of one system, in the order in which they are joined."""

    name: str
    points: list[Point]


class Form(str, Enum):
    """How a panel's points are drawn."""

    LINES = "lines"
    STEPS = "steps"
    BARS = "bars"
    GRID = "grid"
    """Bars, told as a table with a row for each series and a column for each label, of which a series may lack some."""


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    title: str
    x_label: str
    y_label: str
    series: list[Series]
    form: Form = Form.LINES
    x_log: bool = False
    y_log: bool = False

    @property
    def labels(self) -> list[str]:
        """The labels of all points, each once, as they first come."""
        return list(dict.fromkeys(point.label for series in self.series for point in series.points))

    def as_json(self) -> dict[str, Any]:
        """The panel's axes and points."""
        return {
            "title": self.title,
            "x": self.x_label,
            "y": self.y_label,
            "series": [
                {"name": series.name, "points": [point.as_json() for point in series.points]}
                for series in self.series
            ],
        }


@dataclass(frozen=True)
class Comparison:
    """A number that the paper reports beside ours. `allowed` is the distance that still counts as the same, None where
    none is asked for; `value` is None where there is none, and `remark` says why.
    """

    name: str
    paper: float
    value: Estimate | None
    allowed: float | None = None
    remark: str = ""

    @property
    def holds(self) -> bool | None:
        """Whether the mean lies within `allowed` of the paper's number; None if nothing is asked for."""
        if self.allowed is None:
            return None
        return self.value is not None and abs(self.value.mean - self.paper) <= self.allowed

    def as_json(self) -> dict[str, Any]:
        """Both numbers and the verdict."""
        value = None if self.value is None else self.value.as_json()
        return {
            "name": self.name,
            "paper": self.paper,
            "value": value,
            "allowed": self.allowed,
            "holds": self.holds,
            "remark": self.remark,
        }


@dataclass(frozen=True)
class Drawing:
    """What a figure came to."""

    panels: list[Panel]
    comparisons: list[Comparison] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


def exactly(value: float) -> Estimate:
    """A number that no seed changes."""
    return Estimate(value, value, value)


def bar(label: str, value: Estimate, **more: Estimate) -> Point:
    """A bar's point: its label stands in for x."""
    return Point(exactly(0.0), value, label, more)
