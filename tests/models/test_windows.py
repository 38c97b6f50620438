"""Blocks of a windowed row show each token exactly the tokens that its window holds."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.models import windows
from strata.models.windows import Block, blocks_of


def seen_by(block: Block, cached: int, token: int) -> list[int]:
    """Places of the context that a new token attends to by its block."""
    place = cached + token
    seen = list(range(*block.seen))
    if block.stop - block.start > 1:
        seen += range(cached + block.start, place + 1)
    hidden = block.hidden_edge()[token - block.start]
    edge = [key for key, out in zip(range(*block.edge), hidden, strict=True) if not out]
    assert edge or block.edge[0] >= block.edge[1], "no kernel is asked about a row without keys"
    return seen + edge


@settings(max_examples=300, deadline=None)
@given(
    length=st.integers(1, 40),
    cached=st.integers(0, 60),
    window=st.none() | st.integers(1, 70),
    most=st.sampled_from([1, 2, 7, 256]),
)
def test_blocks_show_what_the_window_holds(length: int, cached: int, window: int | None, most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(windows, "BLOCK_TOKENS", most)
        blocks = list(blocks_of(length, cached + length, window))
    assert [token for block in blocks for token in range(block.start, block.stop)] == list(range(length))
    for block in blocks:
        for token in range(block.start, block.stop):
            place = cached + token
            first = 0 if window is None else max(0, place + 1 - window)
            assert sorted(seen_by(block, cached, token)) == list(range(first, place + 1))
