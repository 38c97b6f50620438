"""The policy that picks how a transfer goes: by a kernel with so many blocks, or by the copy engine in one batch; and
whether a load's layers go one by one, so that the first can be computed while the others come, or all at once.

Blocks are processors that the model does not get, so the fewest win that are about as quick as the quickest; the copy
engine takes none but costs the host a descriptor for every piece, so it must be clearly quicker. A load of few bytes
costs the host more than the link: there all layers at once spare it a command for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from strata.device.kernels import BACKUP_BLOCKS, LOAD_BLOCKS

Direction = Literal["load", "backup"]
DIRECTIONS: tuple[Direction, ...] = ("load", "backup")

AS_QUICK = 1.05
"""A kernel with fewer blocks is taken if it takes at most this many times as long as the quickest."""
CLEARLY_QUICKER = 0.9
"""The copy engine is taken if it takes at most this part of the kernel's time."""
WHOLE_WAITS = 2.0
"""All layers go at once if that takes at most this many times as long as one layer of those that go one by one: the
model then waits hardly longer for its first layer, and for no other."""


@dataclass(frozen=True)
class Path:
    """How pieces move. `blocks` is 0 for `batch`. `whole`: all layers of a load by one command; a backup always is."""

    kind: Literal["kernel", "batch"]
    blocks: int = 0
    whole: bool = False

    def __str__(self) -> str:
        how = "copy engine" if self.kind == "batch" else f"kernel of {self.blocks} blocks"
        return f"{how}, all layers at once" if self.whole else how


@dataclass(frozen=True)
class Measurement:
    """A transfer of `pages` pages took `seconds` by `path`."""

    direction: Direction
    pages: int
    path: Path
    seconds: float


@dataclass(frozen=True)
class PathChoice:
    """For each direction (pages, path) with rising pages: a path serves transfers from that many pages on, the first
    one smaller ones too."""

    loads: tuple[tuple[int, Path], ...] = ((0, Path("kernel", LOAD_BLOCKS)),)
    backups: tuple[tuple[int, Path], ...] = ((0, Path("kernel", BACKUP_BLOCKS)),)

    def of(self, direction: Direction, pages: int) -> Path:
        """The path of a transfer of so many pages."""
        table = self.loads if direction == "load" else self.backups
        chosen = table[0][1]
        for least, path in table:
            if least <= pages:
                chosen = path
        return chosen

    def __str__(self) -> str:
        def shown(table: tuple[tuple[int, Path], ...]) -> str:
            return ", ".join(f"{path} from {pages} pages" for pages, path in table)

        return f"loads by {shown(self.loads)}; backups by {shown(self.backups)}"


def choose(measurements: Sequence[Measurement], layers: int) -> PathChoice:
    """The best paths for so many layers, as far as they were measured; a direction that was not keeps its default."""
    default = PathChoice()
    return PathChoice(
        _table([one for one in measurements if one.direction == "load"], layers) or default.loads,
        _table([one for one in measurements if one.direction == "backup"], layers) or default.backups,
    )


def _table(measurements: Sequence[Measurement], layers: int) -> tuple[tuple[int, Path], ...]:
    paths: dict[int, Path] = {}
    smaller = 0
    for pages in sorted({one.pages for one in measurements}):
        seconds = {one.path: one.seconds for one in measurements if one.pages == pages}
        usual = _best({path: took for path, took in seconds.items() if not path.whole})
        at_once = {path: took for path, took in seconds.items() if path.whole}
        whole = _best(at_once) if at_once else None
        if whole is not None and seconds[whole] <= WHOLE_WAITS * seconds[usual] / layers:
            # More pages would keep the first layer waiting for longer than was measured, fewer do not.
            paths |= {smaller + 1: whole, pages + 1: usual}
        else:
            paths[pages] = usual
        smaller = pages
    rising = sorted(paths.items())
    return tuple(
        (pages, path)
        for place, (pages, path) in enumerate(rising)
        if place == 0 or rising[place - 1][1] != path
    )


def _best(seconds: dict[Path, float]) -> Path:
    kernels = {path: took for path, took in seconds.items() if path.kind == "kernel"}
    batches = {path: took for path, took in seconds.items() if path.kind == "batch"}
    if not kernels:
        return min(batches, key=lambda path: batches[path])
    limit = min(kernels.values()) * AS_QUICK
    kernel = min((path for path in kernels if kernels[path] <= limit), key=lambda path: path.blocks)
    for batch, took in batches.items():
        if took <= kernels[kernel] * CLEARLY_QUICKER:
            return batch
    return kernel
