"""What tests of several folders share: one server of the default model, whose start takes longer than most tests.

Its tests come last and together, so that it does not stand beside the others'. They may not take its cache to be empty.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from default_server import default_server

os.environ.setdefault(
    "LITELLM_LOCAL_MODEL_COST_MAP", "True"
)  # else importing it fetches prices from the network


@pytest.fixture(scope="session")
def default_server_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where it serves; it starts with the first test that asks for it."""
    with default_server(tmp_path_factory.mktemp("default-server")) as address:
        yield address


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_needs_the_default_server)


def _needs_the_default_server(item: pytest.Item) -> bool:
    return "default_server_url" in getattr(item, "fixturenames", ())
