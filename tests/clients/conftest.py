"""What the tests of this folder ask: a server of the default model, as a user starts it."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest


@pytest.fixture(scope="session")
def http(default_server_url: str) -> Iterator[httpx.Client]:
    """A plain HTTP client of that server."""
    with httpx.Client(base_url=default_server_url, timeout=120) as client:
        yield client
