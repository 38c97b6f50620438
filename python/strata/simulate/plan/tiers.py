"""Sizes of tiers, and which ones are worth a simulation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from strata.config import format_size, parse_size
from strata.errors import ConfigError

GIB = 1 << 30
_MIB = 1 << 20
_WHOLE_GIB_FROM = 8 * GIB
"""Sizes from here on are whole GiB: nobody buys less."""
HOST_PARTS = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
DISK_PARTS = (1 / 4, 1.0)
"""Sizes to begin with, as parts of everything that the workload ever holds."""


@dataclass(frozen=True, order=True)
class Tiers:
    """Bytes of one device's memory, of its host's and of its disk's share."""

    device: int
    host: int
    disk: int

    def is_within(self, other: Tiers) -> bool:
        """Whether no tier is larger than the other's."""
        return self.device <= other.device and self.host <= other.host and self.disk <= other.disk

    def __str__(self) -> str:
        return (
            f"device {format_size(self.device)}, host {format_size(self.host)}, disk {format_size(self.disk)}"
        )


@dataclass(frozen=True)
class Grid:
    """The sizes to begin with, in rising order."""

    devices: tuple[int, ...]
    hosts: tuple[int, ...]
    disks: tuple[int, ...]

    def points(self) -> list[Tiers]:
        """Every combination."""
        return [
            Tiers(device, host, disk) for device in self.devices for disk in self.disks for host in self.hosts
        ]


def rounded(size: float) -> int:
    """A size that can be bought: whole GiB, or whole MiB of small ones."""
    unit = GIB if size >= _WHOLE_GIB_FROM else _MIB
    return math.ceil(size / unit) * unit


def parts_of(everything: float, parts: Iterable[float]) -> tuple[int, ...]:
    """0, and these parts of everything."""
    return tuple(sorted({0, *(rounded(everything * part) for part in parts)}))


def sizes_of(flag: str, given: Sequence[str], least: int = 0) -> tuple[int, ...]:
    """Sizes from a flag's values, each one size or several parted by commas, in rising order. Raises ConfigError."""
    wanted = "give sizes such as 64GiB,128GiB"
    sizes: set[int] = set()
    for text in (each for value in given for each in value.split(",")):
        try:
            size = parse_size(text)
        except ValueError as error:
            raise ConfigError(f"{flag} {text}: {error}; {wanted}") from error
        if not least <= size <= 1 << 60:
            raise ConfigError(f"{flag} {text} is not between {format_size(least)} and 2^60 bytes; {wanted}")
        sizes.add(size)
    return tuple(sorted(sizes))


def between(below: int, above: int, resolution: float) -> int | None:
    """A size half-way by ratio; None once the two are as near as `resolution` asks."""
    if above <= below * (1 + resolution) or above <= _MIB:
        return None
    middle = rounded(math.sqrt(below * above) if below else above / 2)
    return middle if below < middle < above else None
