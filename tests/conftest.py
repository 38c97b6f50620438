"""What tests of several folders share: one server of the default model, whose start takes longer than most tests.

Tests that ask for it may not take its cache to be empty.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

from default_server import default_server

# Else importing litellm fetches prices from the network.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

USERS_OF_THE_SERVER = ("tests/clients/", "tests/test_snippets.py")


@pytest.fixture(scope="session")
def default_server_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where it serves; it starts with the first test that asks for it."""
    with default_server(tmp_path_factory.mktemp("default-server")) as address:
        yield address


class SchedulingByServer(LoadFileScheduling):
    """A file's tests go to one process, those of the server's users too: each process would start its own."""

    def _split_scope(self, nodeid: str) -> str:
        return (
            "the server's users" if nodeid.startswith(USERS_OF_THE_SERVER) else super()._split_scope(nodeid)
        )


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> SchedulingByServer | None:
    """What `--dist loadfile` of `make test` means here."""
    return SchedulingByServer(config, log) if config.getvalue("dist") == "loadfile" else None
