"""A Llama model's shape, read from a Hugging Face ``config.json`` and checked once.

Whatever the decoder does not compute exactly (another architecture, activation or rope type) is refused here
with a `ModelError`, so that the rest of `strata.models` never has to ask again.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from strata.errors import ModelError

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM",)


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched: ``kind`` is "linear" or "llama3"."""

    kind: str
    factor: float
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_context_length: int = 8192


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and constants of one Llama decoder; every field is in units of elements or tokens."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context_length: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ModelError(
                f"config.json: {self.heads} attention heads are no multiple of {self.kv_heads} KV heads"
            )
        if self.head_dim % 2:
            raise ModelError(f"config.json: head_dim {self.head_dim} is odd; rotary embeddings need pairs")

    @property
    def kv_elements_per_token(self) -> int:
        """Elements of K and V that one token keeps over all layers."""
        return self.layers * 2 * self.kv_heads * self.head_dim

    def rope_frequencies(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Angle per position of each rotary pair, [head_dim / 2], with the scaling applied."""
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.int64).to(dtype) / self.head_dim
        frequencies = 1.0 / (self.rope_theta**exponents)
        scaling = self.rope_scaling
        if scaling is None:
            return frequencies
        if scaling.kind == "linear":
            return frequencies / scaling.factor
        # Llama 3.1: long wavelengths are stretched by the factor, short ones kept, those between blended.
        wavelengths = 2 * math.pi / frequencies
        turns = scaling.original_context_length / wavelengths
        span = scaling.high_frequency_factor - scaling.low_frequency_factor
        kept = ((turns - scaling.low_frequency_factor) / span).clamp(0.0, 1.0)
        return (1 - kept) * frequencies / scaling.factor + kept * frequencies


def load_config(folder: Path) -> ModelConfig:
    """Read ``config.json`` (and ``generation_config.json`` for more end tokens) of a model folder."""
    raw = read_json(folder / "config.json")
    generation_path = folder / "generation_config.json"
    generation = read_json(generation_path) if generation_path.is_file() else {}
    return parse_config(raw, generation, str(folder))


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``; a `ModelError` names the file when it is missing or malformed."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(
            f"{path} does not exist; --model needs a Hugging Face folder, a .gguf file or `default`"
        ) from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a {type(value).__name__}, not a JSON object")
    return value


def parse_config(
    raw: dict[str, Any], generation: dict[str, Any] | None = None, where: str = "config"
) -> ModelConfig:
    """Turn the keys of a ``config.json`` into a `ModelConfig`; ``where`` names the source in errors."""
    _check_architecture(raw, where)
    try:
        heads = int(raw["num_attention_heads"])
        hidden_size = int(raw["hidden_size"])
        rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
        return ModelConfig(
            vocab_size=int(raw["vocab_size"]),
            hidden_size=hidden_size,
            intermediate_size=int(raw["intermediate_size"]),
            layers=int(raw["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(raw.get("head_dim") or hidden_size // heads),
            context_length=int(raw.get("max_position_embeddings", 2048)),
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0),
            rope_scaling=_parse_rope_scaling(rope, where),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            attention_bias=bool(raw.get("attention_bias", False)),
            mlp_bias=bool(raw.get("mlp_bias", False)),
            bos_token_id=_token_ids(raw.get("bos_token_id"))[0]
            if raw.get("bos_token_id") is not None
            else None,
            eos_token_ids=tuple(
                dict.fromkeys(
                    _token_ids(raw.get("eos_token_id")) + _token_ids((generation or {}).get("eos_token_id"))
                )
            ),
        )
    except KeyError as error:
        raise ModelError(f"{where}: config.json lacks {error.args[0]!r}") from error
    except (TypeError, ValueError) as error:
        raise ModelError(f"{where}: config.json holds a value of the wrong kind: {error}") from error


def _check_architecture(raw: dict[str, Any], where: str) -> None:
    architectures = raw.get("architectures") or []
    named = architectures[0] if architectures else raw.get("model_type")
    if named not in (*SUPPORTED_ARCHITECTURES, "llama"):
        raise ModelError(
            f"{where}: architecture {named!r} is not supported; "
            f"--model takes {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelError(f"{where}: hidden_act {activation!r} is not supported; a Llama model uses 'silu'")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise ModelError(
            f"{where}: weights quantised with {method!r} are not supported; "
            "give --model a full-precision folder or a .gguf file"
        )


def _parse_rope_scaling(rope: dict[str, Any], where: str) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", float(rope["factor"]))
    if kind == "llama3":
        return RopeScaling(
            "llama3",
            float(rope["factor"]),
            float(rope["low_freq_factor"]),
            float(rope["high_freq_factor"]),
            int(rope["original_max_position_embeddings"]),
        )
    raise ModelError(
        f"{where}: rope type {kind!r} is not supported; known are 'default', 'linear' and 'llama3'"
    )


def _token_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(item) for item in value) if isinstance(value, list) else (int(value),)
