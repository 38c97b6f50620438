"""The line that each request leaves."""

from __future__ import annotations

import pytest

from strata.engine.api import TokenSources, Usage
from strata.serve.request_log import request_line


@pytest.mark.parametrize(
    ("usage", "line"),
    [
        (
            Usage(4012, 64, TokenSources(disk=3984, computed=28), 0.6, 15.2),
            "4,012 in: 3,984 disk, 28 computed | TTFT 0.6 s, saved ~15 s | 64 out",
        ),
        (Usage(5, 1, TokenSources(computed=5), 0.0123, 0.0), "5 in: 5 computed | TTFT 12 ms | 1 out"),
        (
            Usage(100, 1200, TokenSources(1, 2, 3, 94), 12.34, 0.04, preemptions=2),
            "100 in: 1 device, 2 host, 3 disk, 94 computed | TTFT 12 s, saved ~40 ms | 1,200 out"
            " | preempted 2 times",
        ),
    ],
)
def test_request_line(usage: Usage, line: str) -> None:
    assert request_line(usage) == line
