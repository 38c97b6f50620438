"""The paper's figures from the simulator. A figure selects hardware, models, systems, workloads and rates; every
constant stays in the table, and changing one redraws all. `python -m strata.simulate --figure N` draws one.
"""

from strata.simulate.figures.drawing import Comparison, Drawing, Estimate, Panel, Point, Series
from strata.simulate.figures.registry import FIGURES, Figure, Kind, figure_of
from strata.simulate.figures.study import Case, Study

__all__ = [
    "FIGURES",
    "Case",
    "Comparison",
    "Drawing",
    "Estimate",
    "Figure",
    "Kind",
    "Panel",
    "Point",
    "Series",
    "Study",
    "figure_of",
]
