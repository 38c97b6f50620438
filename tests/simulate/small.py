"""Simulations that take milliseconds: few questions about few documents, on a device that holds some of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from strata.simulate import WaitingRequest, configure

WORKLOAD = {
    "contexts": 8,
    "queries": 40,
    "context_tokens": {"law": "log_normal", "mean": 2000.0, "sigma": 0.5},
    "question_tokens": {"law": "log_normal", "mean": 50.0, "sigma": 0.1},
    "output_tokens": {"law": "log_normal", "mean": 4.0, "sigma": 0.1},
    "rate": 30.0,
}


def small(
    name: str = "sglang-hicache",
    /,
    workload: Mapping[str, Any] | None = None,
    hardware: Mapping[str, Any] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """The configuration, with these changes."""
    overrides = {
        "workload": {**WORKLOAD, **(workload or {})},
        "hardware": {"device_bytes": 36e9, **(hardware or {})},
        "warm": True,
        **changes,
    }
    return configure("h200", "qwen2.5-14b", name, "loogle", overrides)


class Order:
    """An order by a function, which notes what it was given and what it answered."""

    def __init__(self, choose: Callable[[Sequence[WaitingRequest]], list[int]]) -> None:
        self.choose = choose
        self.asked: list[tuple[float, list[WaitingRequest]]] = []

    def order(self, waiting: Sequence[WaitingRequest], now: float) -> list[int]:
        self.asked.append((now, list(waiting)))
        return self.choose(waiting)


def in_turn(waiting: Sequence[WaitingRequest]) -> list[int]:
    """As they stand in the queue."""
    return [request.id for request in waiting]


def at_once(tokens: Sequence[int]) -> dict[str, Any]:
    """Requests of so many tokens that share nothing, all at once."""
    requests = [
        {
            "arrival_s": 0.0,
            "prompt": [{"id": 1 + place, "tokens": count}],
            "output": 2,
            "answer": 1000 + place,
        }
        for place, count in enumerate(tokens)
    ]
    return {
        **small(),
        "workload": {"kind": "explicit", "requests": requests},
        "warm": False,
        "list_requests": True,
    }
