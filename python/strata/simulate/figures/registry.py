"""Every figure by its number, and by name those that the paper does not have: what it compares, and whether it is
measured in the simulator, follows from the constants, or is a sketch of which only the shape is meant.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from strata.errors import ConfigError
from strata.simulate.figures import (
    beyond,
    figure_01,
    figure_02,
    figure_03,
    figure_05,
    figure_08,
    figure_09,
    figure_10,
    figure_11,
    figure_12,
    figure_13,
    figure_14,
    figure_15,
    ideas,
)
from strata.simulate.figures.drawing import Drawing
from strata.simulate.figures.study import Study


class Kind(str, Enum):
    """What a figure's numbers are."""

    MEASURED = "measured"
    CALIBRATION = "calibration"
    SKETCH = "sketch"


@dataclass(frozen=True)
class Figure:
    """A figure of the paper, or one that goes on from there. `caption` says what the paper draws and what had to be
    assumed here. Where it is `selectable`, a study may be limited to some models and workloads.
    """

    number: int | str
    title: str
    kind: Kind
    caption: str
    draw: Callable[[Study], Drawing]
    selectable: bool = False

    @property
    def heading(self) -> str:
        """Its number, or name, and its title."""
        return f"{'Figure ' if isinstance(self.number, int) else ''}{self.number}: {self.title}"


_ALL = (
    Figure(1, "Prefill stalled for loads", Kind.MEASURED, figure_01.CAPTION, figure_01.draw),
    Figure(2, "Hit rate and TTFT by page size", Kind.SKETCH, figure_02.CAPTION, figure_02.draw),
    Figure(3, "Loading 8,192 tokens", Kind.CALIBRATION, figure_03.CAPTION, figure_03.draw),
    Figure(
        5, "What copies cost the computing beside them", Kind.CALIBRATION, figure_05.CAPTION, figure_05.draw
    ),
    Figure(8, "Throughput against TTFT", Kind.MEASURED, figure_08.CAPTION, figure_08.draw, True),
    Figure(9, "Copies and scheduling apart", Kind.MEASURED, figure_09.CAPTION, figure_09.draw),
    Figure(10, "Peak throughput by page size", Kind.MEASURED, figure_10.CAPTION, figure_10.draw),
    Figure(11, "What each part adds, by cache distance", Kind.MEASURED, figure_11.CAPTION, figure_11.draw),
    Figure(12, "Delay hits by rate and time to resolve", Kind.SKETCH, figure_12.CAPTION, figure_12.draw),
    Figure(13, "Layouts on disk", Kind.MEASURED, figure_13.CAPTION, figure_13.draw),
    Figure(14, "A faster link", Kind.MEASURED, figure_14.CAPTION, figure_14.draw),
    Figure(15, "Sustained bandwidth", Kind.CALIBRATION, figure_15.CAPTION, figure_15.draw),
    Figure(
        "beyond",
        "Our scheduler between the published one and an oracle",
        Kind.MEASURED,
        beyond.CAPTION,
        beyond.draw,
        True,
    ),
    Figure("ideas", "What each idea of ours brings", Kind.MEASURED, ideas.CAPTION, ideas.draw, True),
)
FIGURES: dict[int | str, Figure] = {figure.number: figure for figure in _ALL}


def figure_of(number: int | str) -> Figure:
    """The figure of a number or name. Raises ConfigError that names those that there are."""
    if number not in FIGURES:
        known = ", ".join(str(one) for one in FIGURES)
        raise ConfigError(
            f"--figure {number} is not drawn: choose of {known} (4, 6 and 7 hold no measurements)"
        )
    return FIGURES[number]
