"""GGUF files of every supported family give the logits and tokens of the model that they were written from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from families import LLAMA3_ROPE, VARIANTS, tiny
from gguf_files import (
    MERGES,
    PIECES,
    SPECIAL,
    SPM_TOKENS,
    TOKENS,
    WORDS,
    byte_level,
    fields_of,
    sentence_piece,
    write_gguf,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from transformers import AutoTokenizer

from strata.errors import ModelError
from strata.models import gguf_folder, load_model, resolve_model
from strata.models.gguf_tokenizer import SPLITS, build_tokenizer

PRE = {"llama": "llama-bpe", "mistral": "tekken", "qwen2": "qwen2", "qwen3": "qwen2"}
LONG_LLAMA3_ROPE = {**LLAMA3_ROPE, "original_max_position_embeddings": 8192}
NO_SUCH_KEYS = ("attention bias", "fractions", "upper", "chosen", "rope of llama 3")
WRITTEN = [name for name in VARIANTS if not any(part in name for part in NO_SUCH_KEYS)]


def settings_of(variant: str) -> dict[str, Any]:
    if variant == "qwen3, yarn":
        return {"rope_parameters": {**VARIANTS[variant][1]["rope_parameters"], "attention_factor": None}}
    return {}


@pytest.mark.parametrize("variant", WRITTEN)
def test_logits_agree(variant: str, tmp_path: Path) -> None:
    theirs = tiny(variant, vocab_size=len(TOKENS), **settings_of(variant))
    source = tmp_path / "model.gguf"
    write_gguf(source, theirs, byte_level(PRE[theirs.config.model_type]))
    loaded = load_model(source, cache_dir=tmp_path / "cache")
    tokens = torch.randint(0, len(TOKENS), (60,), generator=torch.Generator().manual_seed(3)).tolist()
    with torch.inference_mode():
        expected = theirs(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(loaded.model.reference_forward(tokens), expected, rtol=1e-4, atol=1e-4)
    assert loaded.tokenizer.eos_token_ids == {TOKENS.index("<|end|>"), TOKENS.index("<|turn|>")}
    text = loaded.tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert text == "<|user|>hi<|end|>"


def test_llama_3_rope_is_known_by_its_table(tmp_path: Path) -> None:
    theirs = tiny("llama", vocab_size=len(TOKENS), rope_parameters=LONG_LLAMA3_ROPE)
    source = tmp_path / "model.gguf"
    write_gguf(source, theirs, byte_level("llama-bpe"))
    loaded = load_model(source, cache_dir=tmp_path / "cache")
    tokens = list(range(100))
    with torch.inference_mode():
        expected = theirs(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(loaded.model.reference_forward(tokens), expected, rtol=1e-4, atol=1e-4)
    other = tmp_path / "other.gguf"
    write_gguf(other, tiny("llama, rope of llama 3", vocab_size=len(TOKENS)), byte_level("llama-bpe"))
    with pytest.raises(ModelError, match=r"rope_freqs\.weight.* no table of Llama 3's"):
        resolve_model(other, tmp_path / "cache")


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0"])
@pytest.mark.parametrize("variant", ["llama", "qwen2"])
def test_quantised_tensors_are_expanded(kind: str, variant: str, tmp_path: Path) -> None:
    theirs = tiny(variant, vocab_size=len(TOKENS))
    source = tmp_path / "model.gguf"
    weights = write_gguf(source, theirs, byte_level("qwen2"), gguf.GGMLQuantizationType[kind])
    theirs.load_state_dict(weights)
    tokens = list(range(80))
    with torch.inference_mode():
        expected = theirs(torch.tensor([tokens])).logits[0]
    found = load_model(source, cache_dir=tmp_path / "cache").model.reference_forward(tokens)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_large_models_are_written_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = tiny("qwen3", vocab_size=len(TOKENS))
    source = tmp_path / "model.gguf"
    write_gguf(source, theirs, byte_level("qwen2"))
    whole = load_model(source, cache_dir=tmp_path / "one")
    monkeypatch.setattr(gguf_folder, "SHARD_BYTES", 60_000)
    shards = load_model(source, cache_dir=tmp_path / "other")
    assert len(whole.files) == 2 and len(shards.files) > 5
    index = json.loads((shards.path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * sum(p.numel() for p in theirs.parameters())
    tokens = list(range(30))
    assert torch.equal(whole.model.reference_forward(tokens), shards.model.reference_forward(tokens))


@pytest.mark.parametrize(
    ("variant", "more", "words"),
    [
        ("llama", {"tokenizer_pre": "gemma4"}, "pre-tokenizer 'gemma4'"),
        ("llama", {"tokenizer_model": "t5"}, "tokenizer 't5'"),
        ("llama", {"rope_scaling_type": gguf.RopeScalingType.LONGROPE}, "rope scaling 'longrope'"),
        ("llama", {"rope_dimension_count": 8}, "turns 8 of 16 elements"),
        ("qwen2", {"sliding_window": 100}, "which layers have the sliding window of 100"),
        ("llama", {"feed_forward_length": None}, r"lacks 'llama\.feed_forward_length'"),
    ],
)
def test_what_a_file_says_and_is_not_computed_is_refused(
    variant: str, more: dict[str, Any], words: str, tmp_path: Path
) -> None:
    source = tmp_path / "model.gguf"
    write_gguf(source, tiny(variant, vocab_size=len(TOKENS)), {**byte_level("qwen2"), **more})
    with pytest.raises(ModelError, match=words):
        resolve_model(source, tmp_path / "cache")
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "gemma3")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"'gemma3' is not supported.*llama, qwen2, qwen3"):
        resolve_model(tmp_path / "model.gguf", tmp_path / "cache")


def spelt(tokenizer: FastTokenizer, text: str) -> list[str]:
    return [piece.replace("Ġ", "_") for piece in tokenizer.encode(text).tokens]


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "the 123abc", "the _ 123 abc"),
        ("smollm", "the 123", "the _ 1 2 3"),
        ("llama-bpe", "123123 paris", "<|begin|> 123 123 _paris"),
        ("llama-bpe", "abcd", "<|begin|> abcd"),
        ("qwen2", "the 123", "the _ 1 2 3"),
        ("qwen2", "abcd", "abc d"),
        ("deepseek-r1-qwen", "The", "T h e"),
        ("tekken", "abCab abcd", "<|begin|> ab C ab _ abc d"),
        ("tekken", "123 paris", "<|begin|> 1 2 3 _paris"),
    ],
)
def test_text_is_split_as_the_name_says(pre: str, text: str, pieces: str) -> None:
    assert spelt(build_tokenizer(fields_of(byte_level(pre))), text) == pieces.split(" ")


@pytest.mark.parametrize("pre", SPLITS)
def test_special_tokens_and_bytes_come_back(pre: str) -> None:
    tokenizer = build_tokenizer(fields_of(byte_level(pre, add_bos_token=False)))
    text = "Grüße <|turn|>  12345\n\tthe 日本\u00a0½ don't WE'LL</s> naïve"
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert TOKENS.index("<|turn|>") in ids


def test_composed_and_decomposed_characters_are_the_same_to_qwen() -> None:
    qwen, other = (build_tokenizer(fields_of(byte_level(pre))) for pre in ("qwen2", "gpt-2"))
    one, two = "caf\u00e9", "cafe\u0301"
    assert qwen.encode(one).ids == qwen.encode(two).ids
    assert other.encode(one).ids != other.encode(two).ids


def merged_by_score(text: str, scores: list[float]) -> list[str]:
    """SentencePiece in its own words: of all neighbours whose union is a piece, join those of the best score."""
    rank = dict(zip(PIECES, scores, strict=True))
    parts = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [
            (-rank[union], place)
            for place in range(len(parts) - 1)
            if (union := parts[place] + parts[place + 1]) in rank
        ]
        if not pairs:
            break
        place = min(pairs)[1]
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    spelled = [[part] if part in rank else [f"<0x{byte:02X}>" for byte in part.encode()] for part in parts]
    return [piece for pieces in spelled for piece in pieces]


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(st.sampled_from("theab é"), min_size=1, max_size=12),
    order=st.permutations(range(len(PIECES))),
)
def test_sentence_piece_merges_by_score(text: str, order: list[int]) -> None:
    scores = [-float(place) for place in order]
    tokenizer = build_tokenizer(fields_of(sentence_piece(scores, add_bos_token=False)))
    encoded = tokenizer.encode(text)
    assert encoded.tokens == merged_by_score(text, scores)
    assert tokenizer.decode(encoded.ids) == text


def test_a_sentence_piece_file_is_a_model(tmp_path: Path) -> None:
    theirs = tiny("mistral, window", vocab_size=len(SPM_TOKENS))
    source = tmp_path / "model.gguf"
    write_gguf(source, theirs, sentence_piece())
    loaded = load_model(source, cache_dir=tmp_path / "cache")
    ids = loaded.tokenizer.encode("the ab é")
    assert ids[0] == 1 and loaded.tokenizer.decode(ids) == "the ab é"
    assert ids == AutoTokenizer.from_pretrained(loaded.path)("the ab é").input_ids
    stream = loaded.tokenizer.detokenizer()
    assert "".join(stream.push(token) for token in ids) + stream.finish() == "the ab é"
    assert loaded.config.windows == (24,) * 3
    assert not np.isnan(loaded.model.reference_forward(ids).numpy()).any()


def test_no_token_is_reached_by_chance() -> None:
    """What the tests above rely on."""
    assert not {"".join(merge) for merge in MERGES} & {*WORDS, *SPECIAL}
