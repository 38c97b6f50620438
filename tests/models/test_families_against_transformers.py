"""Random models of every supported family and shape give the logits and the greedy tokens that `transformers` gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from families import FAMILIES, VARIANTS, VOCABULARY, tiny
from paged_runner import PagedRunner

from strata.models import CausalLM, load_config
from strata.models.weights import WeightFiles

CPU = torch.device("cpu")
PROMPT = 90


def opened(folder: Path) -> CausalLM:
    config = load_config(folder)
    return CausalLM(config, WeightFiles(folder, config, torch.float32, CPU))


def prompt(seed: int = 7, count: int = PROMPT) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (count,), generator=generator).tolist()


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_agree(variant: str, tmp_path: Path) -> None:
    """Of a whole prompt; of one that is cut into chunks; of single tokens behind it; of one whose first pages another
    row has computed. Every context outgrows every window."""
    theirs = tiny(variant)
    theirs.save_pretrained(tmp_path)
    model = opened(tmp_path)
    tokens = prompt()
    with torch.inference_mode():
        expected = theirs(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(model.reference_forward(tokens), expected, rtol=1e-4, atol=1e-4)
    runner = PagedRunner(model, page_size=4, pages=128)
    row, other = runner.row(tokens), runner.row(tokens)
    found = [runner.step([(row, count)])[0] for count in (50, 33, 1, 5, 1)]
    torch.testing.assert_close(torch.cat(found), expected, rtol=1e-4, atol=1e-4)
    other.pages[:12], other.computed = row.pages[:12], 48
    found = [runner.step([(other, count)])[0] for count in (1, 41)]
    torch.testing.assert_close(torch.cat(found), expected[48:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_sharded_folders_agree(family: str, tmp_path: Path) -> None:
    theirs = tiny(next(variant for variant in VARIANTS if variant.startswith(family)))
    theirs.save_pretrained(tmp_path, max_shard_size="100KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    with torch.inference_mode():
        expected = theirs(torch.tensor([prompt()])).logits[0]
    found = opened(tmp_path).reference_forward(prompt())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "variant", ["llama", "mistral, window", "qwen2, upper layers windowed", "qwen3", "qwen3, yarn"]
)
def test_greedy_tokens_agree(variant: str, tmp_path: Path) -> None:
    theirs = tiny(variant)
    theirs.save_pretrained(tmp_path)
    model = opened(tmp_path)
    tokens, count = prompt(count=40), 40
    with torch.inference_mode():
        expected = theirs.generate(
            torch.tensor([tokens]), max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
        )[0].tolist()
    runner = PagedRunner(model, page_size=4, pages=64)
    row = runner.row(tokens + [0] * count)
    logits = runner.step([(row, len(tokens))])[0]
    for place in range(len(tokens), len(expected)):
        row.tokens[place] = int(logits[-1].argmax())
        logits = runner.step([(row, 1)])[0]
    assert row.tokens == expected
