"""Shapes of published models, as far as memory and speed depend on them; the numbers are those of the config.json that
each has on its hub page.
"""

from __future__ import annotations

from typing import Any

from strata.models import ModelConfig
from strata.models.config import parse_config


def _raw(
    architecture: str,
    vocabulary: int,
    hidden: int,
    inner: int,
    layers: int,
    heads: tuple[int, int],
    **more: Any,
) -> dict[str, Any]:
    return {
        "architectures": [f"{architecture}ForCausalLM"],
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "tie_word_embeddings": True,
        "max_position_embeddings": 32768,
        **more,
    }


SHAPES: dict[str, dict[str, Any]] = {
    "SmolLM2-135M": _raw("Llama", 49152, 576, 1536, 30, (9, 3), max_position_embeddings=8192),
    "SmolLM2-360M": _raw("Llama", 49152, 960, 2560, 32, (15, 5), max_position_embeddings=8192),
    "Qwen2.5-0.5B": _raw("Qwen2", 151936, 896, 4864, 24, (14, 2)),
    "Qwen3-0.6B": _raw("Qwen3", 151936, 1024, 3072, 28, (16, 8), head_dim=128),
    "Llama-3.2-1B": _raw("Llama", 128256, 2048, 8192, 16, (32, 8), max_position_embeddings=131072),
    "Qwen2.5-1.5B": _raw("Qwen2", 151936, 1536, 8960, 28, (12, 2)),
    "Qwen3-1.7B": _raw("Qwen3", 151936, 2048, 6144, 28, (16, 8), head_dim=128),
    "Llama-3.2-3B": _raw("Llama", 128256, 3072, 8192, 28, (24, 8), max_position_embeddings=131072),
    "Mistral-7B-v0.1": _raw(
        "Mistral", 32000, 4096, 14336, 32, (32, 8), tie_word_embeddings=False, sliding_window=4096
    ),
}
"""By name, from the smallest up."""


def shape_of(name: str) -> ModelConfig:
    """The config of a model of `SHAPES`."""
    return parse_config(SHAPES[name], where=name)
