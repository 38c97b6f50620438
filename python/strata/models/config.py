"""A decoder's shape, read from a Hugging Face ``config.json`` and checked once.

The supported architectures are one decoder with a few switches: each is a line of `ARCHITECTURES`. Whatever that
decoder does not compute exactly (another architecture, activation or rope type) is refused here with a `ModelError`,
so that the rest of `strata.models` never has to ask again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from strata.errors import ModelError
from strata.models.rope import RopeScaling, parse_rope_scaling, rope_frequencies

Windows = tuple[int | None, ...]


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and constants of one decoder; every field is in units of elements or tokens.

    ``query_key_value_bias`` and ``attention_output_bias``: which projections of attention add a bias.
    ``query_key_norm``: each head's query and key are normed before rope.
    ``windows``: for each layer the newest tokens, the present one included, that it attends to; None: all. Empty where
    no layer has a window.
    """

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
    query_key_value_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    query_key_norm: bool = False
    windows: Windows = ()
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ModelError(
                f"config.json: {self.heads} attention heads are no multiple of {self.kv_heads} KV heads"
            )
        if self.head_dim % 2:
            raise ModelError(f"config.json: head_dim {self.head_dim} is odd; rotary embeddings need pairs")
        if self.windows and len(self.windows) != self.layers:
            raise ModelError(
                f"config.json: layer_types names {len(self.windows)} layers, num_hidden_layers {self.layers}"
            )
        if any(window is not None and window < 1 for window in self.windows):
            raise ModelError("config.json: sliding_window is below 1; a token attends to itself at least")

    @property
    def kv_elements_per_token(self) -> int:
        """Elements of K and V that one token keeps over all layers."""
        return self.layers * 2 * self.kv_heads * self.head_dim

    @property
    def rope_factor(self) -> float:
        """What cosine and sine of rotary angles are multiplied with."""
        return 1.0 if self.rope_scaling is None else self.rope_scaling.attention_factor

    def rope_frequencies(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Angle per position of each rotary pair, [head_dim / 2], with the scaling applied."""
        return rope_frequencies(self.rope_theta, self.head_dim, self.rope_scaling, dtype)

    def window(self, layer: int) -> int | None:
        """The newest tokens that a layer attends to; None: all."""
        return self.windows[layer] if self.windows else None


@dataclass(frozen=True)
class Architecture:
    """What one family's config.json means, where families differ.

    ``context_length``, ``kv_heads`` and ``head_dim`` stand in for keys that it leaves out, as in `transformers`; None:
    worked out from the others. ``windows`` gives each layer's window. ``may_bias_attention`` and ``may_bias_mlp``: the
    family heeds the keys ``attention_bias`` and ``mlp_bias``. The rest is always so, whatever the keys say.
    """

    model_type: str
    context_length: int
    kv_heads: int | None = None
    head_dim: int | None = None
    windows: Callable[[dict[str, Any], int], Windows] = lambda raw, layers: ()
    may_bias_attention: bool = False
    may_bias_mlp: bool = False
    query_key_value_bias: bool = False
    query_key_norm: bool = False


def _every_layer(raw: dict[str, Any], layers: int) -> Windows:
    """Mistral: one window for all layers; without the key it is that of the first Mistral 7B."""
    window = raw.get("sliding_window", 4096)
    return () if window is None else (int(window),) * layers


def _upper_layers(raw: dict[str, Any], layers: int) -> Windows:
    """Qwen: a window from layer ``max_window_layers`` on, if it is turned on at all."""
    if not raw.get("use_sliding_window") or raw.get("sliding_window", 4096) is None:
        return ()
    window, first = int(raw.get("sliding_window", 4096)), int(raw.get("max_window_layers", 28))
    kinds = raw.get("layer_types") or [
        "sliding_attention" if layer >= first else "full_attention" for layer in range(layers)
    ]
    unknown = sorted(set(kinds) - {"sliding_attention", "full_attention"})
    if unknown:
        raise ModelError(
            f"config.json: layer_types names {unknown[0]!r}; known are full and sliding attention"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


ARCHITECTURES = {
    "LlamaForCausalLM": Architecture("llama", 2048, may_bias_attention=True, may_bias_mlp=True),
    "MistralForCausalLM": Architecture("mistral", 131072, kv_heads=8, windows=_every_layer),
    "Qwen2ForCausalLM": Architecture(
        "qwen2", 32768, kv_heads=32, windows=_upper_layers, query_key_value_bias=True
    ),
    "Qwen3ForCausalLM": Architecture(
        "qwen3",
        32768,
        kv_heads=32,
        head_dim=128,
        windows=_upper_layers,
        may_bias_attention=True,
        query_key_norm=True,
    ),
}
"""By the name that config.json gives under ``architectures``."""


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
        raise ModelError(f"{path} cannot be read as JSON: {error}; download it again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a {type(value).__name__}, not a JSON object")
    return value


def parse_config(
    raw: dict[str, Any], generation: dict[str, Any] | None = None, where: str = "config"
) -> ModelConfig:
    """Turn the keys of a ``config.json`` into a `ModelConfig`; ``where`` names the source in errors."""
    family = _architecture(raw, where)
    try:
        heads, hidden_size = int(raw["num_attention_heads"]), int(raw["hidden_size"])
        layers = int(raw["num_hidden_layers"])
        context_length = int(raw.get("max_position_embeddings") or family.context_length)
        rope = {
            "partial_rotary_factor": raw.get("partial_rotary_factor"),
            **(raw.get("rope_parameters") or raw.get("rope_scaling") or {}),
        }
        scaling = parse_rope_scaling(rope, context_length, where)
        if scaling is not None and scaling.kind == "yarn":
            # Folders give the length before stretching or the one after it.
            context_length = max(context_length, int(scaling.original_context_length * scaling.factor))
        biased = family.may_bias_attention and bool(raw.get("attention_bias", False))
        return ModelConfig(
            vocab_size=int(raw["vocab_size"]),
            hidden_size=hidden_size,
            intermediate_size=int(raw["intermediate_size"]),
            layers=layers,
            heads=heads,
            kv_heads=int(raw.get("num_key_value_heads", family.kv_heads) or heads),
            head_dim=int(raw.get("head_dim", family.head_dim) or hidden_size // heads),
            context_length=context_length,
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0),
            rope_scaling=scaling,
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            query_key_value_bias=biased or family.query_key_value_bias,
            attention_output_bias=biased,
            mlp_bias=family.may_bias_mlp and bool(raw.get("mlp_bias", False)),
            query_key_norm=family.query_key_norm,
            windows=_within(family.windows(raw, layers), context_length),
            bos_token_id=next(iter(_token_ids(raw.get("bos_token_id"))), None),
            eos_token_ids=tuple(
                dict.fromkeys(
                    _token_ids(raw.get("eos_token_id")) + _token_ids((generation or {}).get("eos_token_id"))
                )
            ),
        )
    except KeyError as error:
        raise ModelError(f"{where}: config.json lacks {error.args[0]!r}") from error
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelError(f"{where}: config.json holds a value of the wrong kind: {error}") from error


def _architecture(raw: dict[str, Any], where: str) -> Architecture:
    """The family of a config.json. Raises `ModelError` if it is none that is supported, or computes something else."""
    architectures = raw.get("architectures") or []
    named = str(architectures[0] if architectures else raw.get("model_type"))
    by_type = {family.model_type: family for family in ARCHITECTURES.values()}
    family = ARCHITECTURES.get(named) or by_type.get(named)
    if family is None:
        raise ModelError(
            f"{where}: architecture {named!r} is not supported; --model takes {', '.join(ARCHITECTURES)}"
        )
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelError(f"{where}: hidden_act {activation!r} is not supported; {named} uses 'silu'")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise ModelError(
            f"{where}: weights quantised with {method!r} are not supported; "
            "give --model a full-precision folder or a .gguf file"
        )
    return family


def _within(windows: Windows, context_length: int) -> Windows:
    """The windows without those that no context outgrows."""
    kept = tuple(None if window is None or window >= context_length else window for window in windows)
    return kept if any(window is not None for window in kept) else ()


def _token_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(item) for item in value) if isinstance(value, list) else (int(value),)
