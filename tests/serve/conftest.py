"""Fixtures of the server's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from running_server import RunningServer
from server_process import Run, ServerProcess


@pytest.fixture
def serve() -> Iterator[Callable[..., RunningServer]]:
    """Starts servers with settings by name, and ends them after the test."""
    servers: list[RunningServer] = []

    def start(engine: Any = None, **settings: Any) -> RunningServer:
        servers.append(RunningServer(settings, engine))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture(scope="module")
def shared_server() -> Iterator[RunningServer]:
    """One server with default settings for a whole file."""
    server = RunningServer()
    yield server
    server.stop()


@pytest.fixture
def served(shared_server: RunningServer) -> RunningServer:
    """The file's server, with a fake engine as good as new."""
    shared_server.engine.reset()
    return shared_server


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Starts programs and ends what a test leaves."""
    programs: list[ServerProcess] = []

    def start(*flags: str, **environment: str) -> ServerProcess:
        programs.append(ServerProcess(flags, environment, tmp_path))
        return programs[-1]

    yield start
    for program in programs:
        program.close()
