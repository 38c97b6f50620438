"""Transfers of whole pools between the two layouts, beside a non-temporal memcpy of the same bytes."""

from __future__ import annotations

from typing import Any

import pytest

from strata._core import CopyYardstick
from strata.bench.report import median

POOL_BYTES = 256 << 20


@pytest.mark.parametrize("kind", ["load", "backup"])
@pytest.mark.parametrize("piece_bytes", [2 << 10, 4 << 10, 32 << 10, 64 << 10])
@pytest.mark.benchmark(group="copy")
def test_transfer(benchmark: Any, kind: str, piece_bytes: int) -> None:
    """Two threads, pages in order; both memcpys run between the rounds."""
    yardstick = CopyYardstick(piece_bytes, POOL_BYTES, 2)
    spans: dict[str, list[float]] = {"engine": [], "streaming": [], "library": []}

    def memcpys() -> None:
        spans["streaming"].append(yardstick.memcpy(kind, True))
        spans["library"].append(yardstick.memcpy(kind, False))

    benchmark.pedantic(
        lambda: spans["engine"].append(yardstick.transfer(kind)), setup=memcpys, rounds=9, warmup_rounds=1
    )
    middle = {name: median(found) for name, found in spans.items()}
    benchmark.extra_info |= {
        "ratio_to_streaming": middle["streaming"] / middle["engine"],
        "ratio_to_faster": min(middle["streaming"], middle["library"]) / middle["engine"],
    }
    assert all(seconds > 0 for seconds in middle.values())
