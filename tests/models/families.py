"""Test help: tiny random models of every supported family and switch, as `transformers` makes them."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCABULARY = 130
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILIES: dict[str, tuple[type[Any], type[PreTrainedModel]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, attention bias": ("llama", {"attention_bias": True}),
    "llama, mlp bias": ("llama", {"mlp_bias": True}),
    "llama, wide heads": ("llama", {"head_dim": 32}),
    "llama, no sharing": ("llama", {"num_key_value_heads": 4}),
    "llama, rope of llama 3": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama, linear rope": ("llama", {"rope_parameters": LINEAR_ROPE}),
    "mistral, window": ("mistral", {"sliding_window": 24}),
    "mistral, tiny window": ("mistral", {"sliding_window": 2}),
    "mistral, window of one": ("mistral", {"sliding_window": 1}),
    "mistral, wide heads, no window": ("mistral", {"sliding_window": None, "head_dim": 32}),
    "mistral, context within the window": ("mistral", {"sliding_window": 4096}),
    "qwen2": ("qwen2", {"sliding_window": 7}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2, upper layers windowed": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
    "qwen2, yarn": ("qwen2", {"rope_parameters": YARN_ROPE}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3, tied": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3, attention bias": ("qwen3", {"head_dim": 16, "attention_bias": True}),
    "qwen3, chosen layers windowed": (
        "qwen3",
        {
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": 11,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3, yarn": ("qwen3", {"head_dim": 32, "rope_parameters": {**YARN_ROPE, "attention_factor": 1.3}}),
    "qwen3, yarn with fractions": (
        "qwen3",
        {"head_dim": 32, "rope_parameters": {**YARN_ROPE, "truncate": False, "beta_fast": 4.0}},
    ),
}


def tiny(variant: str, **changes: Any) -> Any:
    """A random model of a variant, as `transformers` computes it; nothing in it is zero or one by chance."""
    family, settings = VARIANTS[variant]
    config_class, model_class = FAMILIES[family]
    given = {"num_key_value_heads": 2, "tie_word_embeddings": False, **settings, **changes}
    torch.manual_seed(5)
    config = config_class(
        vocab_size=given.pop("vocab_size", VOCABULARY),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=512,
        attn_implementation="sdpa",
        initializer_range=0.2,
        **given,
    )
    model = model_class(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.5)
        elif name.endswith("norm.weight"):
            torch.nn.init.uniform_(parameter, 0.5, 2.0)
    return model
