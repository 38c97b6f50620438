"""One server of the default model, as a user starts it, shared by the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from default_server import default_server


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where it serves."""
    with default_server(tmp_path_factory.mktemp("clients")) as address:
        yield address


@pytest.fixture(scope="session")
def http(url: str) -> Iterator[httpx.Client]:
    """A plain HTTP client of that server."""
    with httpx.Client(base_url=url, timeout=120) as client:
        yield client
