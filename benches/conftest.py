"""What the benchmarks share: the default model, an engine over tiers of its own, prompts, and the reference.

A benchmark's time is the engine's; what it is judged by is measured side by side, between its rounds, and stands in
`extra_info` as a ratio. Whatever the numbers are, a benchmark passes: they are for `make bench-compare` and for people.
"""

from __future__ import annotations

import os

# As in `strata.bench`: before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from collections.abc import Iterator
from pathlib import Path

import pytest

from strata.bench.corpus import default_documents, make_prompts
from strata.bench.reference import Reference, load_reference
from strata.bench.target import EngineTarget
from strata.config import StrataConfig
from strata.engine.served_model import ServedModel, load_served_model
from strata.models import DEFAULT_MODEL

PROMPT_TOKENS = 1000


@pytest.fixture(scope="session")
def served() -> ServedModel:
    """The default model in float32."""
    return load_served_model(StrataConfig.of(disk_capacity="0").model)


@pytest.fixture(scope="session")
def reference(served: ServedModel) -> Reference:
    """`transformers` with SDPA on the same weights."""
    return load_reference(served.model, DEFAULT_MODEL)


@pytest.fixture(scope="session")
def prompts(served: ServedModel) -> list[list[int]]:
    """Prompts of 1,000 tokens over texts that differ."""
    made = make_prompts(default_documents(), served.tokenizer, PROMPT_TOKENS, 8, 1)
    return [prompt.token_ids for prompt in made]


@pytest.fixture
def target(served: ServedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineTarget]:
    """An engine with all three tiers, empty."""
    root: Path = tmp_path_factory.mktemp("kv")
    config = StrataConfig.of(
        disk_path=root, device_memory="512MiB", host_memory="512MiB", disk_capacity="2GiB"
    )
    made = EngineTarget(config, served)
    yield made
    made.close()
