"""The tensors of a Hugging Face folder by name: each is checked for presence and shape, then read lazily.

Tensors are read one by one from memory-mapped safetensors files, so that loading never holds the model twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from strata.errors import ModelError
from strata.models.config import ModelConfig, read_json

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
SHOWN_NAMES = 4
_CPU = torch.device("cpu")


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a model of this config has."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    in_biased, out_biased, mlp_biased = (
        config.query_key_value_bias,
        config.attention_output_bias,
        config.mlp_bias,
    )
    projections = {
        "self_attn.q_proj": ((query, hidden), in_biased),
        "self_attn.k_proj": ((key, hidden), in_biased),
        "self_attn.v_proj": ((key, hidden), in_biased),
        "self_attn.o_proj": ((hidden, query), out_biased),
        "mlp.gate_proj": ((inner, hidden), mlp_biased),
        "mlp.up_proj": ((inner, hidden), mlp_biased),
        "mlp.down_proj": ((hidden, inner), mlp_biased),
    }
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}"
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
        if config.query_key_norm:
            shapes[f"{prefix}.self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[f"{prefix}.self_attn.k_norm.weight"] = (config.head_dim,)
        for name, (shape, biased) in projections.items():
            shapes[f"{prefix}.{name}.weight"] = shape
            if biased:
                shapes[f"{prefix}.{name}.bias"] = shape[:1]
    return shapes


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, sorted; a `ModelError` if none or not all are there."""
    index = folder / INDEX_NAME
    if index.is_file():
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing or not names:
            raise ModelError(
                f"{index} names shards that are not there: {_some(missing)}; download the folder again"
            )
        return [folder / name for name in names]
    if (folder / SINGLE_NAME).is_file():
        return [folder / SINGLE_NAME]
    raise ModelError(
        f"{folder} has neither {SINGLE_NAME} nor {INDEX_NAME}; --model needs safetensors weights or a .gguf"
    )


class WeightFiles:
    """Checked, lazy access to the tensors of a folder. ``get(name)`` reads and converts one tensor."""

    def __init__(self, folder: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.files = weight_files(folder)
        self._dtype = dtype
        self._device = device
        self._handles = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for path in self.files:
            try:
                handle = safe_open(str(path), framework="pt")
            except (OSError, SafetensorError) as error:
                raise ModelError(
                    f"{path} is no readable safetensors file: {error}; download it again"
                ) from error
            for name in handle.keys():  # noqa: SIM118 - a safetensors handle is no dict
                self._handles[name] = handle
                shapes[name] = tuple(handle.get_slice(name).get_shape())
        check_shapes(shapes, config, str(folder))

    def get(self, name: str) -> torch.Tensor:
        """One tensor, in the wanted dtype and on the wanted device."""
        tensor: torch.Tensor = self._handles[name].get_tensor(name)
        return tensor.to(device=self._device, dtype=self._dtype)


class RandomWeights:
    """The same access to weights of any size that are drawn on the device when asked for, the same ones for a seed,
    shape, dtype and device. For benchmarks: such a model says nothing, at a real model's speed."""

    def __init__(self, seed: int, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._shapes = expected_shapes(config)
        self._seeds = {name: seed * len(self._shapes) + place for place, name in enumerate(self._shapes)}
        self._dtype = dtype
        self._device = device

    def get(self, name: str) -> torch.Tensor:
        """One tensor: norms are one, all else is drawn so that activations neither vanish nor grow."""
        shape = self._shapes[name]
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=self._dtype, device=self._device)
        generator = torch.Generator(self._device).manual_seed(self._seeds[name])
        drawn = torch.randn(shape, generator=generator, dtype=self._dtype, device=self._device)
        return drawn.mul_(shape[-1] ** -0.5)


class WeightDict:
    """The same access over tensors that are already in memory (tests, converters)."""

    def __init__(
        self,
        tensors: dict[str, torch.Tensor],
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device = _CPU,
    ) -> None:
        check_shapes({name: tuple(tensor.shape) for name, tensor in tensors.items()}, config, "weights")
        self._tensors = tensors
        self._dtype = dtype
        self._device = device

    def get(self, name: str) -> torch.Tensor:
        """One tensor, in the wanted dtype and on the wanted device."""
        return self._tensors[name].to(device=self._device, dtype=self._dtype)


def check_shapes(found: dict[str, tuple[int, ...]], config: ModelConfig, where: str) -> None:
    """Raise a `ModelError` that names the tensors that are missing, unknown or of another shape."""
    expected = expected_shapes(config)
    missing = [name for name in expected if name not in found]
    if missing:
        raise ModelError(
            f"{where}: {len(missing)} tensors are missing: {_some(missing)}; the folder is incomplete"
        )
    extra = [name for name in found if name not in expected and not _is_ignorable(name, config)]
    if extra:
        raise ModelError(
            f"{where}: {len(extra)} tensors are unknown to this config: {_some(extra)}; check config.json"
        )
    wrong = [
        f"{name} is {found[name]}, not {shape}" for name, shape in expected.items() if found[name] != shape
    ]
    if wrong:
        raise ModelError(f"{where}: {len(wrong)} tensors contradict config.json: {_some(wrong)}")


def _is_ignorable(name: str, config: ModelConfig) -> bool:
    # Old exports store the rope table; tied models sometimes store the shared matrix twice.
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_word_embeddings)


def _some(names: list[str]) -> str:
    shown: Iterator[str] = iter(names[:SHOWN_NAMES])
    rest = len(names) - SHOWN_NAMES
    return ", ".join(shown) + (f" and {rest} more" if rest > 0 else "")
