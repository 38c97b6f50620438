"""What a model's folder says beside its weights: how it wants to be sampled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from families import tiny
from gguf_files import TOKENS, byte_level, fields_of

from strata.config import ModelOptions
from strata.engine.served_model import ServedModel, load_served_model
from strata.errors import ModelError
from strata.models.gguf_tokenizer import build_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    tiny("qwen3", vocab_size=len(TOKENS)).save_pretrained(made)
    build_tokenizer(fields_of(byte_level("qwen2"))).save(str(made / "tokenizer.json"))
    return made


def load(folder: Path, generation: dict[str, Any] | None, **options: Any) -> ServedModel:
    file = folder / "generation_config.json"
    file.unlink(missing_ok=True)
    if generation is not None:
        file.write_text(json.dumps(generation))
    return load_served_model(ModelOptions(model=str(folder), dtype="float32", threads=1, **options))


def test_what_the_makers_want_is_known_under_the_names_of_a_requests_fields(folder: Path) -> None:
    given = {
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "min_p": 0,
        "repetition_penalty": 1.05,
        "max_new_tokens": 2048,
        "eos_token_id": [1, 2],
        "pad_token_id": 0,
    }
    wanted = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05, "max_tokens": 2048}
    assert load(folder, given).sampling_defaults == wanted, "what changes nothing is left out"
    assert load(folder, given, generation_config="none").sampling_defaults == {}
    neutral = {"temperature": 1.0, "top_p": None, "top_k": -1, "repetition_penalty": 1}
    assert load(folder, neutral).sampling_defaults == {}
    assert load(folder, None).sampling_defaults == {}


@pytest.mark.parametrize(
    ("generation", "words"),
    [
        ({"temperature": "hot"}, "temperature 'hot' is no number"),
        ({"temperature": True}, "temperature True is no number"),
        ({"top_k": 2.5}, "top_k 2.5 is no whole number"),
        ({"temperature": float("inf")}, "temperature inf is no number"),
        ({"max_new_tokens": 10**400}, "max_new_tokens 1000"),
        ({"max_new_tokens": 0}, "max_tokens must be a whole number of at least 1"),
        ({"temperature": -1}, "temperature and top_k must be at least 0"),
        ({"top_p": 1.5}, "top_p between 0 and 1"),
        ({"min_p": float("nan")}, "min_p nan is no number"),
        ({"repetition_penalty": 0}, "repetition_penalty must be between"),
    ],
)
def test_what_no_request_may_send_is_refused_at_the_start(
    folder: Path, generation: dict[str, Any], words: str
) -> None:
    with pytest.raises(ModelError) as caught:
        load(folder, generation)
    message = str(caught.value)
    assert words in message and str(folder / "generation_config.json") in message
    assert "--generation-config none" in message
    assert load(folder, generation, generation_config="none").sampling_defaults == {}
