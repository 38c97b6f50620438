"""Test help: GGUF files of tiny models, written with the `gguf` package as the converters of the world write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import pre_tokenizers

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}
TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
SPECIAL = ["<|begin|>", "<|end|>", "<|turn|>"]
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("1", "2"), ("12", "3"), ("a", "b"), ("b", "c"), ("ab", "c")]
WORDS = ["Ġparis", "abcd"]
"""Tokens that no merge leads to."""
TOKENS = [*BYTES, *("".join(merge) for merge in MERGES), *WORDS, *SPECIAL]

PIECES = ["▁", "t", "h", "e", "a", "b", "th", "he", "the", "▁the", "▁a", "ab", "▁▁", "ba", "▁t"]
CONTROLS = ["<unk>", "<s>", "</s>"]
BYTE_PIECES = [f"<0x{byte:02X}>" for byte in range(256)]
SPM_TOKENS = [*CONTROLS, *BYTE_PIECES, *PIECES]


def byte_level(pre: str, **more: Any) -> dict[str, Any]:
    """A tokenizer of bytes, a few merges and special tokens."""
    kinds = [gguf.TokenType.CONTROL if token in SPECIAL else gguf.TokenType.NORMAL for token in TOKENS]
    return {
        "tokenizer_model": "gpt2",
        "tokenizer_pre": pre,
        "token_list": TOKENS,
        "token_types": kinds,
        "token_merges": [" ".join(merge) for merge in MERGES],
        "bos_token_id": TOKENS.index("<|begin|>"),
        "eos_token_id": TOKENS.index("<|end|>"),
        "eot_token_id": TOKENS.index("<|turn|>"),
        "chat_template": TEMPLATE,
        **more,
    }


def sentence_piece(scores: list[float] | None = None, **more: Any) -> dict[str, Any]:
    """A SentencePiece tokenizer of bytes and a few pieces, which begins every text with `<s>` and a space."""
    kinds = [gguf.TokenType.UNKNOWN, *[gguf.TokenType.CONTROL] * 2]
    kinds += [gguf.TokenType.BYTE] * 256 + [gguf.TokenType.NORMAL] * len(PIECES)
    own = scores or [-float(place) for place in range(len(PIECES))]
    return {
        "tokenizer_model": "llama",
        "tokenizer_pre": "default",
        "token_list": SPM_TOKENS,
        "token_types": kinds,
        "token_scores": [0.0] * (len(SPM_TOKENS) - len(PIECES)) + own,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unk_token_id": 0,
        **more,
    }


def fields_of(tokenizer: dict[str, Any]) -> dict[str, Any]:
    """What `GGUFReader` gives back of a tokenizer."""
    renamed = {"tokenizer_model": "model", "tokenizer_pre": "pre", "token_list": "tokens"}
    renamed |= {
        "token_types": "token_type",
        "token_merges": "merges",
        "token_scores": "scores",
        "unk_token_id": "unknown_token_id",
    }
    return {f"tokenizer.ggml.{renamed.get(name, name)}": value for name, value in tokenizer.items()}


def write_gguf(
    path: Path,
    theirs: Any,
    tokenizer: dict[str, Any],
    quantised: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    **more: Any,
) -> dict[str, torch.Tensor]:
    """Writes a model of `transformers`; ``tokenizer`` and ``more`` are named as `GGUFWriter`'s methods are. Returns the
    weights that the file stands for: those of the model, but for what quantisation has rounded."""
    config = theirs.config
    architecture = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    rope = config.rope_parameters
    settings = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "head_count": config.num_attention_heads,
        "head_count_kv": config.num_key_value_heads,
        "key_length": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "layer_norm_rms_eps": config.rms_norm_eps,
        "rope_freq_base": rope["rope_theta"],
        **tokenizer,
        **more,
    }
    if getattr(config, "sliding_window", None) and config.model_type == "mistral":
        settings["sliding_window"] = config.sliding_window
    if rope["rope_type"] in ("linear", "yarn"):
        settings["rope_scaling_type"] = gguf.RopeScalingType(rope["rope_type"])
        settings["rope_scaling_factor"] = rope["factor"]
    if rope["rope_type"] == "yarn":
        settings["rope_scaling_orig_ctx_len"] = rope["original_max_position_embeddings"]
    for name, value in settings.items():
        if value is not None:
            getattr(writer, f"add_{name}")(value)
    if rope["rope_type"] == "llama3":
        plain = 1.0 / rope["rope_theta"] ** (np.arange(0, settings["key_length"], 2) / settings["key_length"])
        factors = plain / theirs.model.rotary_emb.inv_freq.numpy()
        writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))
    stands_for = {}
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for name, tensor in theirs.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        kind = quantised if tensor.dim() == 2 else gguf.GGMLQuantizationType.F32
        values = _llama_rows(name, tensor.numpy(), config)
        data = gguf.quants.quantize(values, kind)
        there = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert there is not None, name
        writer.add_tensor(there, data, raw_dtype=kind)
        rounded = gguf.quants.dequantize(data, kind).reshape(values.shape)
        stands_for[name] = torch.from_numpy(_back(name, rounded, config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stands_for


def _heads(name: str, config: Any) -> int:
    """Heads of a projection whose rows a llama file holds in another order; 0: they stay."""
    if ARCHITECTURES[config.model_type] is not gguf.MODEL_ARCH.LLAMA:
        return 0
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    return next((count for part, count in heads.items() if f".{part}." in name), 0)


def _llama_rows(name: str, values: np.ndarray, config: Any) -> np.ndarray:
    heads = _heads(name, config)
    if not heads:
        return values
    halves = values.reshape(heads, 2, len(values) // heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape).copy()


def _back(name: str, values: np.ndarray, config: Any) -> np.ndarray:
    heads = _heads(name, config)
    if not heads:
        return values
    pairs = values.reshape(heads, len(values) // heads // 2, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape).copy()
