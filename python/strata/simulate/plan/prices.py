"""What the bytes of each tier cost. The shipped prices are assumptions and say so; each can be replaced."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from strata.errors import ConfigError
from strata.simulate.plan.tiers import GIB, Tiers

SHIPPED = Path(__file__).parents[1] / "data" / "prices.json"
NAMES = ("device", "host", "disk")


@dataclass(frozen=True)
class Prices:
    """`per_gib` and `sources` by tier; `devices`: how many devices, each with tiers of its own."""

    currency: str
    per_gib: Mapping[str, float]
    sources: Mapping[str, str]
    devices: int = 1

    def cost(self, tiers: Tiers) -> float:
        """What tiers of these sizes cost, for all devices."""
        sizes = zip(NAMES, (tiers.device, tiers.host, tiers.disk), strict=True)
        return self.devices * sum(self.per_gib[name] * size / GIB for name, size in sizes)


def prices_of(given: Sequence[str], devices: int) -> Prices:
    """The shipped prices, and those given as `host=4.5` in place of theirs. Raises ConfigError."""
    shipped = json.loads(SHIPPED.read_text(encoding="utf-8"))
    per_gib = {name: float(shipped["per_gib"][name]["value"]) for name in NAMES}
    sources = {name: str(shipped["per_gib"][name]["source"]) for name in NAMES}
    for each in given:
        name, _, text = each.partition("=")
        wanted = f"give one of {', '.join(NAMES)} and a price of 0 or more, such as host=4.5"
        try:
            price = float(text)
        except ValueError as error:
            raise ConfigError(f"--price-per-gib {each}: {text!r} is no number; {wanted}") from error
        if name not in NAMES or not math.isfinite(price) or price < 0:
            raise ConfigError(f"--price-per-gib {each} is no price of a tier; {wanted}")
        per_gib[name], sources[name] = price, "given: --price-per-gib"
    return Prices(str(shipped["currency"]), per_gib, sources, devices)
