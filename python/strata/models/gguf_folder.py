"""Turns a Llama GGUF file into a Hugging Face folder: float32 weights, config, tokenizer and chat template.

The folder then holds exactly what the GGUF says: quantised tensors are expanded, the row order that GGUF
gives to the query and key projections is undone, and the byte-level BPE tokenizer is rebuilt from the
vocabulary and merges inside.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, ReaderTensor, dequantize
from safetensors.numpy import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from strata.errors import ModelError

# Kinds of tokens in `tokenizer.ggml.token_type`.
CONTROL_TOKEN, USER_DEFINED_TOKEN = 3, 4

_GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_LAYER_TENSORS = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_TOP_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def convert_gguf(source: Path, folder: Path) -> None:
    """Write the model in ``source`` as a Hugging Face folder; ``folder`` must exist.

    Raises `ModelError` if the file is no GGUF or holds an architecture, tokenizer or tensor that cannot be
    converted.
    """
    try:
        reader = GGUFReader(source)
    except (OSError, ValueError, IndexError) as error:
        raise ModelError(f"{source} is no readable GGUF file: {error}") from error
    fields = {name: field.contents() for name, field in reader.fields.items()}
    architecture = fields.get("general.architecture")
    if architecture != "llama":
        raise ModelError(
            f"{source}: GGUF architecture {architecture!r} is not supported; --model takes 'llama' files"
        )
    try:
        config = _config(fields, {tensor.name for tensor in reader.tensors})
        tensors = _tensors(reader.tensors, config)
        tokenizer = _tokenizer(fields)
    except KeyError as error:
        raise ModelError(
            f"{source}: the GGUF file lacks {error.args[0]!r}; convert the model again"
        ) from error
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "config.json", config)
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(fields))
    _write_json(
        folder / "generation_config.json", {key: config[key] for key in ("bos_token_id", "eos_token_id")}
    )


def _config(fields: dict[str, Any], tensor_names: set[str]) -> dict[str, Any]:
    heads = int(fields["llama.attention.head_count"])
    hidden = int(fields["llama.embedding_length"])
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": int(fields["llama.feed_forward_length"]),
        "num_hidden_layers": int(fields["llama.block_count"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(fields.get("llama.attention.head_count_kv", heads)),
        "head_dim": int(fields.get("llama.attention.key_length", hidden // heads)),
        "max_position_embeddings": int(fields["llama.context_length"]),
        # GGUF keeps this as a float32; seven digits give back the number that was written.
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": float(fields.get("llama.rope.freq_base", 10000.0)),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in tensor_names,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
        "torch_dtype": "float32",
    }
    scaling = fields.get("llama.rope.scaling.type", "none")
    if scaling == "linear":
        config["rope_scaling"] = {"rope_type": "linear", "factor": float(fields["llama.rope.scaling.factor"])}
    elif scaling != "none":
        raise ModelError(
            f"GGUF rope scaling {scaling!r} is not supported; give --model the Hugging Face folder instead"
        )
    return config


def _tensors(tensors: Iterable[ReaderTensor], config: dict[str, Any]) -> dict[str, np.ndarray]:
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
        if name.endswith("q_proj.weight"):
            values = _restore_rows(values, config["num_attention_heads"])
        elif name.endswith("k_proj.weight"):
            values = _restore_rows(values, config["num_key_value_heads"])
        converted[name] = values
    return converted


def _hugging_face_name(name: str) -> str:
    if name in _TOP_TENSORS:
        return _TOP_TENSORS[name]
    block, _, rest = name.partition(".")
    layer, _, suffix = rest.partition(".")
    if block == "blk" and layer.isdigit() and suffix in _LAYER_TENSORS:
        return f"model.layers.{layer}.{_LAYER_TENSORS[suffix]}"
    # A rope factor table would change the frequencies; leaving it out would give wrong text without a word.
    raise ModelError(f"GGUF tensor {name!r} is unknown; give --model the Hugging Face folder instead")


def _restore_rows(values: np.ndarray, heads: int) -> np.ndarray:
    """From rotary pairs side by side (i, i + 1) to pairs in halves (i, i + head_dim / 2) within a head."""
    rows, columns = values.shape
    pairs = values.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, columns))


def _tokenizer(fields: dict[str, Any]) -> Tokenizer:
    if fields["tokenizer.ggml.model"] != "gpt2":
        raise ModelError(
            f"GGUF tokenizer {fields['tokenizer.ggml.model']!r} is not supported, "
            "only byte-level BPE ('gpt2'); give --model the Hugging Face folder instead"
        )
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    kinds: list[int] = list(fields["tokenizer.ggml.token_type"])
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = _pre_tokenizer(fields.get("tokenizer.ggml.pre", "default"))
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    added = [token for token, kind in zip(tokens, kinds, strict=True) if kind == USER_DEFINED_TOKEN]
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in added])
    if fields.get("tokenizer.ggml.add_bos_token"):
        begin = int(fields["tokenizer.ggml.bos_token_id"])
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[begin]} $A", special_tokens=[(tokens[begin], begin)]
        )
    return tokenizer


def _pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    def byte_level_after(*steps: pre_tokenizers.PreTokenizer) -> pre_tokenizers.PreTokenizer:
        return pre_tokenizers.Sequence(
            [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )

    if name == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return byte_level_after(digits, pre_tokenizers.Split(Regex(_GPT2_SPLIT), "isolated"))
    if name in ("gpt-2", "default"):
        return byte_level_after(pre_tokenizers.Split(Regex(_GPT2_SPLIT), "isolated"))
    if name in ("llama-bpe", "llama3"):
        return byte_level_after(pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), "isolated"))
    raise ModelError(
        f"GGUF pre-tokenizer {name!r} is not supported; give --model the Hugging Face folder instead"
    )


def _tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(fields["llama.context_length"]),
    }
    for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = fields.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            config[f"{role}_token"] = tokens[int(token_id)]
    if fields.get("tokenizer.ggml.add_bos_token"):
        config["add_bos_token"] = True
    if "tokenizer.chat_template" in fields:
        config["chat_template"] = fields["tokenizer.chat_template"]
    return config


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
