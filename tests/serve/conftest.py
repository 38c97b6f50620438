"""Fixtures of the server's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from running_server import RunningServer


@pytest.fixture
def serve() -> Iterator[Callable[..., RunningServer]]:
    """Starts servers with settings by name, and ends them after the test."""
    servers: list[RunningServer] = []

    def start(**settings: Any) -> RunningServer:
        servers.append(RunningServer(settings))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def served(serve: Callable[..., RunningServer]) -> RunningServer:
    """One server with default settings."""
    return serve()
