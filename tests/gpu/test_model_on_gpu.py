"""The model on a GPU: every way of attention that is installed is right, logits are near the CPU's, and the engine's
answers are those of the whole sequence computed at once, whatever tier its pages come from.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from engine_harness import Sizes, engine_of, tiny_served, wait_idle
from tier_walk import MAX_RUNNING, walk

from gpu_proof.budget import Budget
from gpu_proof.logits import CHUNKS, VOCABULARY, logits_error, paged_logits, small_model
from gpu_proof.tiers import TIERS, TierSettings, measure_tiers
from strata.engine import SamplingParams
from strata.engine.logit_rules import Row
from strata.engine.sampler import sample_rows
from strata.errors import ModelError
from strata.models import ModelConfig, tiny_random_model
from strata.models.attention_choice import TOLERANCE, Place, candidates, choose_attention, error_of

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
CONFIG = ModelConfig(1024, 1024, 2048, layers=2, heads=8, kv_heads=2, head_dim=128, context_length=4096)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("place", range(len(candidates())), ids=[name for name, _ in candidates()])
def test_a_way_of_attention_is_right(place: int, dtype: torch.dtype) -> None:
    _, make = candidates()[place]
    try:
        attention = make(GPU)
        error = error_of(attention, Place(CONFIG, dtype, GPU))
    except (ModelError, RuntimeError, NotImplementedError) as reason:
        pytest.skip(f"not usable with what is installed: {reason}")
    assert error <= TOLERANCE


def test_half_precision_is_served_by_a_kernel() -> None:
    for page_size in (1, 16, 24):
        place = Place(CONFIG, torch.bfloat16, GPU, page_size)
        assert choose_attention(place, candidates()).name != "plain"


@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.bfloat16, 0.1), (torch.float16, 0.02), (torch.float32, 1e-3)]
)
def test_logits_are_near_those_of_float32_on_the_cpu(dtype: torch.dtype, most: float) -> None:
    assert max(logits_error("cuda", dtype, seed) for seed in range(3)) < most


def test_logits_do_not_depend_on_chunks_more_than_rounding_does() -> None:
    model = small_model(1, torch.bfloat16, "cuda")
    tokens = torch.randint(0, VOCABULARY, (sum(CHUNKS),), generator=torch.Generator().manual_seed(1))
    one, other = (paged_logits(model, tokens, chunks, 1) for chunks in (CHUNKS, (len(tokens),)))
    assert float((one - other).norm() / other.norm()) < 0.1


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_greedy_answers_are_exact_from_every_tier(tmp_path: Path, page_size: int) -> None:
    """In float64, so that a wrong byte shows and a rounding does not."""
    model = tiny_random_model(3, device="cuda")
    served = tiny_served(3, model=model)
    sizes = Sizes(page=page_size, device=1000, host=1000, disk_bytes=32 << 20)
    with engine_of(tmp_path, sizes, served, device="cuda", max_running=MAX_RUNNING) as engine:
        for seed in range(3):
            walk(engine, model, seed)
        wait_idle(engine)
        stats = engine.stats()
        assert stats["load_completed"] > 0 and stats["backup_completed"] > 0


def test_pages_of_a_bfloat16_model_keep_their_bytes_in_every_tier() -> None:
    settings = TierSettings(CONFIG, tokens=512, new=64)
    found = measure_tiers(settings, 1, Budget(120.0))
    assert found["changed_pages"] == 0 and set(found["ttft_ms"]) == set(TIERS)
    assert found["attention"] != "plain"


def test_sampling_is_that_of_the_cpu() -> None:
    logits = torch.randn(6, 500, generator=torch.Generator().manual_seed(4))
    params = [
        SamplingParams(logprobs=3),
        SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.2, presence_penalty=0.5),
        SamplingParams(temperature=1.0, top_k=7, logit_bias=((3, 1.5),), min_p=0.01),
    ] * 2
    rows = [Row(each, 5, [3, 8, 3, 9, 1][:place], [8, 7]) for place, each in enumerate(params)]
    rows[0] = Row(params[0], banned=(int(logits[0].argmax()),))
    rows[3] = Row(params[3], allowed=np.arange(500) % 3 == 0)
    on_gpu, on_cpu = sample_rows(logits.cuda(), rows), sample_rows(logits, rows)
    assert [each.token_id for each in on_gpu] == [each.token_id for each in on_cpu]
    for one, other in zip(on_gpu, on_cpu, strict=True):
        assert (one.logprob is None) == (other.logprob is None)
        if one.logprob is not None and other.logprob is not None:
            assert one.logprob.logprob == pytest.approx(other.logprob.logprob, abs=1e-4)
