"""Decoding of 8 streams, beside batched `transformers` with its cache."""

from __future__ import annotations

from typing import Any

import pytest

from strata.bench.decode_command import Round, random_prompts, run_round
from strata.bench.reference import Reference
from strata.bench.report import median
from strata.bench.target import EngineTarget
from strata.engine import ServedModel

STREAMS = 8
PROMPT_TOKENS = 64
NEW_TOKENS = 32


@pytest.mark.benchmark(group="decode")
def test_eight_streams(
    benchmark: Any, target: EngineTarget, served: ServedModel, reference: Reference
) -> None:
    """The benchmark's time is that of both sides together; the rates and their ratio are in `extra_info`."""
    prompts = random_prompts(served.model.config.vocab_size, STREAMS, PROMPT_TOKENS, 0)
    rounds: list[Round] = []

    def both() -> None:
        rounds.append(run_round(len(rounds), target.engine, reference, prompts, NEW_TOKENS))

    benchmark.pedantic(both, rounds=3, warmup_rounds=1)
    engine = median([this.engine_tokens_per_s for this in rounds[1:]])
    other = median([this.reference_tokens_per_s for this in rounds[1:]])
    benchmark.extra_info |= {
        "reference": reference.label,
        "engine_tokens_per_s": engine,
        "reference_tokens_per_s": other,
        "engine_over_reference": engine / other,
    }
    assert engine > 0 and other > 0
