"""Random Llama models of every supported shape give the logits that `transformers` gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from paged_runner import PagedRunner
from transformers import LlamaConfig, LlamaForCausalLM

from strata.models import CausalLM, load_config
from strata.models.weights import WeightFiles

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "attention_bias": {"attention_bias": True},
    "mlp_bias": {"mlp_bias": True},
    "head_dim": {"head_dim": 32},
    "no_sharing": {"num_key_value_heads": 4},
    "llama3_rope": {"rope_parameters": LLAMA3_ROPE},
    "linear_rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("sharded", [False, True])
def test_logits_agree(variant: str, sharded: bool, tmp_path: Path) -> None:
    torch.manual_seed(5)
    settings: dict[str, Any] = {"num_key_value_heads": 2, "tie_word_embeddings": False, **VARIANTS[variant]}
    config = LlamaConfig(
        vocab_size=130,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=512,
        attn_implementation="sdpa",
        initializer_range=0.2,
        **settings,
    )
    theirs = LlamaForCausalLM(config).eval()
    for name, parameter in theirs.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.5)
        elif name.endswith("norm.weight"):
            torch.nn.init.uniform_(parameter, 0.5, 2.0)
    theirs.save_pretrained(tmp_path, max_shard_size="100KB" if sharded else "5GB")
    assert (tmp_path / "model.safetensors.index.json").is_file() == sharded
    ours = load_config(tmp_path)
    model = CausalLM(ours, WeightFiles(tmp_path, ours, torch.float32, torch.device("cpu")))
    tokens = torch.randint(0, 130, (90,)).tolist()
    with torch.inference_mode():
        expected = theirs(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(model.reference_forward(tokens), expected, rtol=1e-4, atol=1e-4)
    runner = PagedRunner(model, page_size=4, pages=64)
    row = runner.row(tokens)
    found = torch.cat([*runner.step([(row, 50)]), *runner.step([(row, 39)]), *runner.step([(row, 1)])])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
