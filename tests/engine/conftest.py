"""Fixtures of the engine's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from engine_harness import MakeEngine, engine_of, tiny_served

from strata.engine import Engine, ServedModel


@pytest.fixture(scope="session", autouse=True)
def one_compute_thread() -> Iterator[None]:
    """A tiny model computes faster without threads to wake."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def served() -> ServedModel:
    """The tiny float64 model."""
    return tiny_served()


@pytest.fixture
def make_engine(tmp_path: Path, served: ServedModel) -> Iterator[MakeEngine]:
    """Engines that are shut down when the test ends. The disk root is `root`, by default the same one each time."""
    engines: list[Engine] = []

    def make(root: Path | None = None, **arguments: object) -> Engine:
        arguments.setdefault("served", served)
        engine = engine_of(root or tmp_path / "kv", **arguments)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.shutdown(drain_s=0.0, demote_s=0.0)
