"""Strata's scheduler and cache on machines that are not here: a discrete-event simulator around the production Core.

`configure` names hardware, model, system and workload out of the table of constants; `simulate` runs one and returns
its report. Equal configurations give equal reports. On the command line: `python -m strata.simulate`.
"""

from strata.simulate.constants import names, table
from strata.simulate.policy import QueueOrder, WaitingRequest
from strata.simulate.report import Distribution, Report, RequestReport, Stalls, TokensBySource
from strata.simulate.run import Traced, at_rate, configure, simulate, simulate_many, simulate_traced

__all__ = [
    "Distribution",
    "QueueOrder",
    "Report",
    "RequestReport",
    "Stalls",
    "TokensBySource",
    "Traced",
    "WaitingRequest",
    "at_rate",
    "configure",
    "names",
    "simulate",
    "simulate_many",
    "simulate_traced",
    "table",
]
