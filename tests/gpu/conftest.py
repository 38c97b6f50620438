"""What needs an NVIDIA GPU. Elsewhere these tests are skipped, and `benches/gpu_transfer.py` is the other half of the
proof (docs/GPU.md). Without the mark `gpu` are those of the tests' own tools.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
import torch


def why_skipped() -> str | None:
    """Why this machine cannot run them, if so."""
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no NVIDIA GPU; docs/GPU.md says how to run this on one"
    if importlib.util.find_spec("cupy") is None:
        return "there is a GPU but no CuPy: install the extra `cuda`"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = why_skipped()
    for item in items:
        if reason is not None and item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def nothing_is_left_on_the_device() -> Iterator[None]:
    """A test that leaves the device broken fails itself, not the next one."""
    yield
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
