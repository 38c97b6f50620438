"""What a conversion is asked for, whatever the format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from strata.errors import ConfigError
from strata.simulate.convert.entry import Order
from strata.simulate.convert.tokens import TokenCounter


@dataclass(frozen=True)
class Conversion:
    """`most_contexts` documents or conversations and `most_requests` requests at most (None: all), in an `order` drawn
    by `seed`. `think_s`: seconds between an answer and the next question (None: the format's own). `time_scale`: a
    trace's arrivals lie so many times as far apart. `split`: the part of a data set that has parts (None: all)."""

    counter: TokenCounter
    order: Order = "shuffle"
    seed: int = 0
    most_contexts: int | None = None
    most_requests: int | None = None
    think_s: float | None = None
    time_scale: float = 1.0
    split: str | None = None

    def __post_init__(self) -> None:
        bounds: list[tuple[str, Any, float]] = [
            ("--most-contexts", self.most_contexts, 1),
            ("--most-requests", self.most_requests, 1),
            ("--think-time", self.think_s, 0),
        ]
        for flag, value, least in bounds:
            if value is not None and not least <= value < float("inf"):
                raise ConfigError(
                    f"{flag} {value} is less than {least:g}; give {least:g} or more, or leave it out"
                )
        if not 0 < self.time_scale < float("inf"):
            raise ConfigError(
                f"--time-scale {self.time_scale:g} is not more than 0; 1 keeps the trace's own times"
            )


@dataclass(frozen=True)
class Converted:
    """A workload as the simulator's table has it, what it comes to, and what its reader should know."""

    workload: Mapping[str, Any]
    statistics: Mapping[str, Any]
    notes: tuple[str, ...]
