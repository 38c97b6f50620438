"""Models with sliding windows and normed heads over all tiers: their answers are those with the cache off, and those of
`transformers`. Every token's K/V are kept whatever the window, so any prefix can be reused.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_harness import MakeEngine, Sizes, ask, assert_exact, tiny_served, wait_idle
from families import tiny
from gguf_files import TOKENS, byte_level, fields_of
from pressure import Load, assert_clean, device_pages, run_clients

from strata.config import ModelOptions
from strata.engine.served_model import load_served_model
from strata.models import tiny_random_model
from strata.models.gguf_tokenizer import build_tokenizer

PROMPT = 61
ANSWER = 30


@pytest.mark.parametrize("windows", [(9, 9, 9), (None, 17, 5)])
def test_streams_under_pressure(make_engine: MakeEngine, windows: tuple[int | None, ...]) -> None:
    model = tiny_random_model(3, windows=windows, query_key_norm=None in windows)
    load = Load(5, clients=24, documents=8, document_tokens=(20, 60), answer_tokens=(1, 30), pause_s=0.3)
    sizes = Sizes(4, device_pages(load, 4, 1.9), 110, 4 << 20)
    engine = make_engine(sizes=sizes, served=tiny_served(3, model=model), batch_tokens=48)
    outcome = run_clients(engine, model, load)
    assert_clean(engine, outcome)
    assert outcome.finished > 10
    stats = engine.stats()
    for counter in ("device_evicted_pages", "host_evicted_pages", "prompt_tokens_host", "prompt_tokens_disk"):
        assert stats[counter] > 0, f"{counter} is 0: the pressure that this test is about was missing"


@pytest.mark.parametrize("variant", ["mistral, window", "qwen2, upper layers windowed", "qwen3, yarn"])
def test_greedy_answers_from_every_tier_are_those_of_transformers(
    variant: str, make_engine: MakeEngine, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    theirs = tiny(variant, vocab_size=len(TOKENS))
    theirs.save_pretrained(folder)
    build_tokenizer(fields_of(byte_level("qwen2"))).save(str(folder / "tokenizer.json"))
    served = load_served_model(ModelOptions(model=str(folder), dtype="float64", threads=1))
    generator = torch.Generator().manual_seed(11)
    prompt = torch.randint(0, len(TOKENS), (PROMPT,), generator=generator).tolist()
    with torch.inference_mode():
        expected = (
            theirs.double()
            .generate(
                torch.tensor([prompt]),
                max_new_tokens=ANSWER,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )[0, PROMPT:]
            .tolist()
        )
    engine = make_engine(sizes=Sizes(4, 40, 60), served=served, batch_tokens=25)
    sources = []
    for tiers in ([], [], ["device"], ["device", "host"]):
        if tiers:
            engine.demote(tiers)
        answer = ask(engine, prompt, max_tokens=ANSWER, ignore_eos=True)
        assert_exact(served.model, prompt, answer)
        assert answer.tokens == expected
        sources.append(answer.sources)
        wait_idle(engine)
    assert sources == [(0, 0, 0, 61), (60, 0, 0, 1), (0, 60, 0, 1), (0, 0, 60, 1)]
