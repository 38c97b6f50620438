"""Turns a GGUF file into a Hugging Face folder: float32 weights, config, tokenizer and chat template.

The folder then holds exactly what the GGUF says: quantised tensors are expanded, and the row order that GGUF gives to
the query and key projections of Llama models is undone. Mistral models are Llama models to GGUF. What the file says
and this decoder does not compute is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, ReaderTensor, dequantize
from safetensors.numpy import save_file

from strata.errors import ModelError
from strata.models.gguf_tokenizer import adds_begin_token, build_tokenizer
from strata.models.rope import RopeScaling, rope_frequencies
from strata.models.weights import INDEX_NAME, SINGLE_NAME

CONVERSION = 2
"""Raised when the conversion changes, so that no old folder is taken for a new."""
SHARD_BYTES = 1 << 30
"""Weights are written in files of about this size, so that a large model need not be in memory at once."""
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""By the name under `general.architecture`."""
INSTEAD = "give --model the Hugging Face folder instead"

_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_ROPE_FACTORS = "rope_freqs.weight"


def convert_gguf(source: Path, folder: Path) -> None:
    """Write the model in ``source`` as a Hugging Face folder; ``folder`` must exist.

    Raises `ModelError` if the file is no GGUF or holds an architecture, tokenizer or tensor that cannot be
    converted.
    """
    try:
        reader = GGUFReader(source)
    except (OSError, ValueError, IndexError) as error:
        raise ModelError(f"{source} is no readable GGUF file: {error}; download it again") from error
    fields = {name: field.contents() for name, field in reader.fields.items()}
    architecture = fields.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"{source}: GGUF architecture {architecture!r} is not supported; --model takes files of "
            f"{', '.join(ARCHITECTURES)} (Mistral models are 'llama' files)"
        )
    try:
        config = _config(fields, {tensor.name: tensor for tensor in reader.tensors})
        tokenizer = build_tokenizer(fields)
        tokenizer_config = _tokenizer_config(fields)
    except KeyError as error:
        raise ModelError(
            f"{source}: the GGUF file lacks {error.args[0]!r}; convert the model again"
        ) from error
    _save_weights([tensor for tensor in reader.tensors if tensor.name != _ROPE_FACTORS], config, folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "config.json", config)
    _write_json(folder / "tokenizer_config.json", tokenizer_config)
    _write_json(
        folder / "generation_config.json", {key: config[key] for key in ("bos_token_id", "eos_token_id")}
    )


def _config(fields: dict[str, Any], tensors: dict[str, ReaderTensor]) -> dict[str, Any]:
    kind = fields["general.architecture"]
    about = {
        name.removeprefix(f"{kind}."): value for name, value in fields.items() if name.startswith(f"{kind}.")
    }

    def needed(name: str) -> Any:
        if name not in about:
            raise KeyError(f"{kind}.{name}")
        return about[name]

    heads, hidden = int(needed("attention.head_count")), int(needed("embedding_length"))
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": int(needed("feed_forward_length")),
        "num_hidden_layers": int(needed("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(about.get("attention.head_count_kv", heads)),
        "head_dim": int(about.get("attention.key_length", hidden // heads)),
        "max_position_embeddings": int(needed("context_length")),
        # GGUF keeps this as a float32; seven digits give back the number that was written.
        "rms_norm_eps": float(f"{needed('attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": float(about.get("rope.freq_base", 10000.0)),
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _end_tokens(fields),
        "torch_dtype": "float32",
    }
    turned = int(about.get("rope.dimension_count", config["head_dim"]))
    if turned != config["head_dim"]:
        raise ModelError(f"GGUF rope turns {turned} of {config['head_dim']} elements of a head; {INSTEAD}")
    scaling = _rope_scaling(about, tensors.get(_ROPE_FACTORS), config)
    if scaling is not None:
        config["rope_scaling"] = scaling
    _add_window(config, int(about.get("attention.sliding_window") or 0))
    return config


def _end_tokens(fields: dict[str, Any]) -> int | list[int] | None:
    """The token that ends a text, and the one that ends a turn where that is another."""
    found = [fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    tokens = list(dict.fromkeys(int(token) for token in found if token is not None))
    return tokens[0] if len(tokens) == 1 else tokens or None


def _add_window(config: dict[str, Any], window: int) -> None:
    """A sliding window of a llama file makes it a Mistral model."""
    if not window or window >= config["max_position_embeddings"]:
        return
    if config["model_type"] != "llama":
        raise ModelError(f"GGUF does not say which layers have the sliding window of {window}; {INSTEAD}")
    config.update(architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=window)


def _rope_scaling(
    about: dict[str, Any], factors: ReaderTensor | None, config: dict[str, Any]
) -> dict[str, Any] | None:
    kind = about.get("rope.scaling.type", "none")
    if factors is not None:
        if kind != "none":
            raise ModelError(f"GGUF rope scaling {kind!r} beside a table of factors is unknown; {INSTEAD}")
        return _scaling_of_table(np.asarray(factors.data, np.float32).reshape(-1), config)
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": float(about["rope.scaling.factor"])}
    if kind == "yarn":
        original = int(about.get("rope.scaling.original_context_length", config["max_position_embeddings"]))
        return {
            "rope_type": "yarn",
            "factor": float(about["rope.scaling.factor"]),
            "original_max_position_embeddings": original,
        }
    raise ModelError(f"GGUF rope scaling {kind!r} is not supported; {INSTEAD}")


def _scaling_of_table(table: np.ndarray, config: dict[str, Any]) -> dict[str, Any]:
    """The numbers behind a table of rope factors: those of Llama 3.1 and later. Another table is refused, since
    leaving it out would give wrong text without a word."""
    guess = RopeScaling("llama3", round(float(table.max()), 3))
    theta, head_dim = config["rope_theta"], config["head_dim"]
    plain, scaled = (
        rope_frequencies(theta, head_dim, scaling, torch.float64).numpy() for scaling in (None, guess)
    )
    if table.shape != plain.shape or not np.allclose(table, plain / scaled, rtol=1e-4):
        raise ModelError(f"GGUF tensor {_ROPE_FACTORS!r} is no table of Llama 3's; {INSTEAD}")
    return {
        "rope_type": "llama3",
        "factor": guess.factor,
        "low_freq_factor": guess.low_frequency_factor,
        "high_freq_factor": guess.high_frequency_factor,
        "original_max_position_embeddings": guess.original_context_length,
    }


def _save_weights(tensors: list[ReaderTensor], config: dict[str, Any], folder: Path) -> None:
    """One file, or several and their index."""
    shards = list(_shards(tensors))
    if len(shards) <= 1:
        save_file(_expanded(tensors, config), str(folder / SINGLE_NAME), metadata={"format": "pt"})
        return
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        values = _expanded(shard, config)
        save_file(values, str(folder / name), metadata={"format": "pt"})
        places |= dict.fromkeys(values, name)
    total = 4 * sum(int(tensor.n_elements) for tensor in tensors)
    _write_json(folder / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": places})


def _shards(tensors: Iterable[ReaderTensor]) -> Iterator[list[ReaderTensor]]:
    shard: list[ReaderTensor] = []
    size = 0
    for tensor in tensors:
        tensor_bytes = 4 * int(tensor.n_elements)
        if shard and size + tensor_bytes > SHARD_BYTES:
            yield shard
            shard, size = [], 0
        shard.append(tensor)
        size += tensor_bytes
    if shard:
        yield shard


def _expanded(tensors: Iterable[ReaderTensor], config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Tensors in float32 under their Hugging Face names."""
    # GGUF turns neighbours in llama files and halves of a head in the others, as Hugging Face folders do.
    turns_neighbours = config["model_type"] in ("llama", "mistral")
    converted: dict[str, np.ndarray] = {}
    for tensor in tensors:
        name = _hugging_face_name(tensor.name)
        try:
            values = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise ModelError(
                f"GGUF tensor {tensor.name}: type {tensor.tensor_type.name} cannot be expanded"
            ) from error
        values = np.ascontiguousarray(values, dtype=np.float32)
        if turns_neighbours and ".q_proj." in name:
            values = _restore_rows(values, config["num_attention_heads"])
        elif turns_neighbours and ".k_proj." in name:
            values = _restore_rows(values, config["num_key_value_heads"])
        converted[name] = values
    return converted


def _hugging_face_name(name: str) -> str:
    if name in _TOP_TENSORS:
        return _TOP_TENSORS[name]
    block, _, rest = name.partition(".")
    layer, _, suffix = rest.partition(".")
    module, _, part = suffix.partition(".")
    if block == "blk" and layer.isdigit() and module in _MODULES and part in ("weight", "bias"):
        return f"model.layers.{layer}.{_MODULES[module]}.{part}"
    raise ModelError(f"GGUF tensor {name!r} is unknown; {INSTEAD}")


def _restore_rows(values: np.ndarray, heads: int) -> np.ndarray:
    """From rotary pairs side by side (i, i + 1) to pairs in halves (i, i + head_dim / 2) within a head."""
    pairs = values.reshape(heads, len(values) // heads // 2, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(values.shape))


def _tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(fields[f"{fields['general.architecture']}.context_length"]),
    }
    for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = fields.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            config[f"{role}_token"] = tokens[int(token_id)]
    if adds_begin_token(fields):
        config["add_bos_token"] = True
    if "tokenizer.chat_template" in fields:
        config["chat_template"] = fields["tokenizer.chat_template"]
    return config


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
