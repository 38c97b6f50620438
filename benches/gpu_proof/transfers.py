"""Bandwidth by piece, page and number of blocks, in both directions, beside the ways that CUDA has without kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

from gpu_proof.budget import Budget
from gpu_proof.pools import Memory
from gpu_proof.rounds import Sample, interleave, median_rate, rate_ratio
from gpu_proof.shapes import DIRECTIONS, Direction, Shape
from strata.device.cuda_runtime import DeviceError
from strata.device.kernels import BACKUP_BLOCKS, LOAD_BLOCKS


@dataclass(frozen=True)
class Row:
    """One way to move one shape's pages. ``ratio`` is its rate as a share of one large copy's, of the same rounds."""

    token_bytes: int
    page_tokens: int
    piece_bytes: int
    direction: Direction
    way: str
    gb_per_s: float
    ratio: float

    def json(self) -> dict[str, object]:
        """As it stands in the result."""
        return asdict(self)


@dataclass(frozen=True)
class Transfers:
    """All rows, and for each shape how many pieces came out wrong. ``refused``: why batches of copies are not among
    them, where CUDA has some but refuses to carry them out."""

    rows: list[Row]
    wrong_pieces: dict[Shape, int]
    refused: str | None = None

    def ratio(self, shape: Shape, direction: Direction, way: str) -> float | None:
        """Of one row, if it was measured."""
        wanted = (shape.token_bytes, shape.page_tokens, direction, way)
        found = [
            row.ratio
            for row in self.rows
            if (row.token_bytes, row.page_tokens, row.direction, row.way) == wanted
        ]
        return found[0] if found else None


def measure_transfers(
    memory: Memory, wanted: list[Shape], blocks: tuple[int, ...], rounds: int, budget: Budget
) -> Transfers:
    """Every way for every shape, as far as the time goes; the first shapes first."""
    rows: list[Row] = []
    wrong: dict[Shape, int] = {}
    refused: str | None = None
    about = 0.0
    for shape in wanted:
        what = f"transfers of pages of {shape.page_tokens} tokens, pieces of {shape.piece_bytes:,} bytes"
        if not budget.allows(what, about):
            continue
        before = budget.left_s()
        pair = memory.pair(shape)
        wrong[shape] = pair.wrong_pieces(LOAD_BLOCKS, BACKUP_BLOCKS)
        for direction in DIRECTIONS:
            ways = pair.ways(direction, blocks)
            if "batch" in ways:
                refused = refused or _refusal(ways["batch"])
                if refused is not None:
                    del ways["batch"]
            found = interleave(ways, rounds)
            rows += [
                Row(
                    shape.token_bytes,
                    shape.page_tokens,
                    shape.piece_bytes,
                    direction,
                    way,
                    median_rate(samples) / 1e9,
                    rate_ratio(samples, found["large"]),
                )
                for way, samples in found.items()
            ]
        about = max(about, before - budget.left_s())
    return Transfers(rows, wrong, refused)


def _refusal(way: Callable[[], Sample]) -> str | None:
    """Why a way does not work here, if so. Raises DeviceError where nothing works any more."""
    try:
        way()
    except DeviceError as error:
        if error.fatal:
            raise
        return str(error)
    return None
