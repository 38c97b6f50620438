"""Unfit model folders are refused with a message that names what is wrong."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from strata.errors import ModelError
from strata.models import fingerprint_files, load_config, load_model, resolve_model
from strata.models.config import ModelConfig, parse_config
from strata.models.weights import WeightFiles, expected_shapes

RAW: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def write_folder(folder: Path, tensors: dict[str, torch.Tensor] | None = None, **changes: Any) -> ModelConfig:
    raw = {**RAW, **changes}
    (folder / "config.json").write_text(json.dumps(raw))
    config = parse_config(raw)
    if tensors is None:
        tensors = random_tensors(config)
    save_file(tensors, str(folder / "model.safetensors"))
    return config


def random_tensors(config: ModelConfig) -> dict[str, torch.Tensor]:
    return {name: torch.randn(shape) for name, shape in expected_shapes(config).items()}


def open_weights(folder: Path, config: ModelConfig) -> WeightFiles:
    return WeightFiles(folder, config, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"num_key_value_heads": 3}, "3 KV heads"),
        ({"vocab_size": "many"}, "wrong kind"),
    ],
)
def test_config_refuses(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        parse_config({**RAW, **changes})


def test_config_names_a_missing_key() -> None:
    raw = dict(RAW)
    del raw["hidden_size"]
    with pytest.raises(ModelError, match="hidden_size"):
        parse_config(raw)


def test_end_tokens_of_config_and_generation_config_are_joined(tmp_path: Path) -> None:
    write_folder(tmp_path, eos_token_id=3)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 7]}))
    assert load_config(tmp_path).eos_token_ids == (3, 7)


def test_old_and_new_rope_keys_mean_the_same() -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    old = parse_config({**RAW, "rope_theta": 500000.0, "rope_scaling": scaling})
    new = parse_config({**RAW, "rope_parameters": {**scaling, "rope_theta": 500000.0}})
    assert old == new
    assert old.rope_theta == 500000.0


QWEN = {**RAW, "architectures": ["Qwen2ForCausalLM"], "sliding_window": 16, "max_window_layers": 1}
WINDOWS: list[tuple[dict[str, Any], tuple[int | None, ...]]] = [
    ({**RAW, "sliding_window": 16}, ()),
    ({**RAW, "architectures": ["MistralForCausalLM"], "sliding_window": 16}, (16, 16)),
    ({**RAW, "architectures": ["MistralForCausalLM"], "sliding_window": 64}, ()),
    ({**RAW, "architectures": ["MistralForCausalLM"], "sliding_window": None}, ()),
    (
        {**RAW, "architectures": ["MistralForCausalLM"], "max_position_embeddings": 32768},
        (4096, 4096),
    ),
    (QWEN, ()),
    ({**QWEN, "use_sliding_window": True}, (None, 16)),
    ({**QWEN, "use_sliding_window": True, "max_window_layers": 2}, ()),
    (
        {**QWEN, "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]},
        (16, None),
    ),
]


@pytest.mark.parametrize(("raw", "windows"), WINDOWS)
def test_windows_are_those_that_a_context_can_outgrow(
    raw: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    config = parse_config(raw)
    assert config.windows == windows
    assert [config.window(layer) for layer in range(2)] == list(windows or (None, None))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layer_types": ["sliding_attention"]}, "layer_types names 1 layers, num_hidden_layers 2"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "'linear_attention'"),
        ({"sliding_window": 0, "max_window_layers": 0}, "sliding_window is below 1"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor 0\.5"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differ by kind of layer"),
    ],
)
def test_qwen_configs_that_are_not_computed_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        parse_config({**QWEN, "use_sliding_window": True, **changes})


def test_yarn_stretches_the_context_whichever_length_the_folder_gives() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    for given in (64, 256):
        config = parse_config({**QWEN, "max_position_embeddings": given, "rope_scaling": yarn})
        assert config.context_length == 256


def test_the_fingerprint_follows_what_changes_keys_and_values(tmp_path: Path) -> None:
    mistral = {"architectures": ["MistralForCausalLM"], "sliding_window": 16}
    changes: list[dict[str, Any]] = [
        mistral,
        {**mistral, "sliding_window": 17},
        {**mistral, "sliding_window": None},
        {**mistral, "rope_theta": 5e5},
        {**mistral, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ]
    torch.manual_seed(1)
    tensors = random_tensors(parse_config({**RAW, **mistral}))
    found = set()
    for number, change in enumerate(changes):
        folder = tmp_path / str(number)
        folder.mkdir()
        write_folder(folder, tensors, **change)
        found.add(fingerprint_files(folder, tmp_path / "cache"))
    assert len(found) == len(changes)


def test_missing_folder_and_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="--model"):
        resolve_model(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"config\.json"):
        load_model(tmp_path)


def test_missing_tensor(tmp_path: Path) -> None:
    config = parse_config(RAW)
    tensors = random_tensors(config)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    write_folder(tmp_path, tensors)
    with pytest.raises(ModelError, match=r"1 tensors are missing: model\.layers\.1\.mlp\.up_proj\.weight"):
        open_weights(tmp_path, config)


def test_unknown_tensor(tmp_path: Path) -> None:
    config = parse_config(RAW)
    write_folder(
        tmp_path, {**random_tensors(config), "model.layers.0.self_attn.q_norm.weight": torch.ones(4)}
    )
    with pytest.raises(ModelError, match="q_norm"):
        open_weights(tmp_path, config)


def test_tensor_of_another_shape(tmp_path: Path) -> None:
    config = parse_config(RAW)
    write_folder(tmp_path, {**random_tensors(config), "model.norm.weight": torch.ones(15)})
    with pytest.raises(ModelError, match=r"model\.norm\.weight is \(15,\), not \(16,\)"):
        open_weights(tmp_path, config)


def test_ignorable_tensors_are_ignored(tmp_path: Path) -> None:
    config = parse_config({**RAW, "tie_word_embeddings": True})
    extra = {
        "lm_head.weight": torch.ones(32, 16),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2),
    }
    write_folder(tmp_path, {**random_tensors(config), **extra}, tie_word_embeddings=True)
    assert open_weights(tmp_path, config).get("model.norm.weight").dtype == torch.float32


def test_missing_shard_and_damaged_file(tmp_path: Path) -> None:
    config = write_folder(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}))
    with pytest.raises(ModelError, match=r"model-00001-of-00002\.safetensors"):
        open_weights(tmp_path, config)
    index.unlink()
    (tmp_path / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0 not a header")
    with pytest.raises(ModelError, match="no readable safetensors"):
        open_weights(tmp_path, config)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="neither"):
        open_weights(tmp_path, config)


def test_fingerprint_follows_content_not_place(tmp_path: Path) -> None:
    one, other, cache = tmp_path / "one", tmp_path / "other", tmp_path / "cache"
    for folder in (one, other):
        folder.mkdir()
        torch.manual_seed(1)
        write_folder(folder)
    first = fingerprint_files(one, cache)
    assert first == fingerprint_files(other, cache) == fingerprint_files(one, tmp_path / "fresh")
    write_folder(other, rms_norm_eps=1e-3, tensors=None)
    assert fingerprint_files(other, cache) != first
    weights = one / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    os.utime(weights, ns=(1, 1))
    assert fingerprint_files(one, cache) != first


def test_damaged_fingerprint_note_is_read_anew(tmp_path: Path) -> None:
    write_folder(tmp_path)
    cache = tmp_path / "cache"
    first = fingerprint_files(tmp_path, cache)
    for note in (cache / "digests").iterdir():
        note.write_text("{")
    assert fingerprint_files(tmp_path, cache) == first
