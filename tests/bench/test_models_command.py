"""`bench models` measures what it says, leaves out what does not fit, and knows the published sizes."""

from __future__ import annotations

import contextlib
import io
import json
import math
import subprocess
from typing import Any

import pytest

from strata.bench import models_command
from strata.bench.model_shapes import SHAPES, shape_of
from strata.errors import CapacityError, ConfigError
from strata.models.weights import expected_shapes

TINY = {
    **SHAPES["Qwen3-0.6B"],
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
FLAGS = ["--prompt-tokens", "40", "--new-tokens", "2", "--json", "-"]


@pytest.fixture(autouse=True)
def tiny_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tiny", "tiny too"):
        monkeypatch.setitem(SHAPES, name, TINY)


@pytest.mark.parametrize(
    ("name", "millions"),
    [("SmolLM2-135M", 134.5), ("Qwen2.5-0.5B", 494.0), ("Llama-3.2-1B", 1235.8), ("Mistral-7B-v0.1", 7241.7)],
)
def test_shapes_have_the_published_number_of_parameters(name: str, millions: float) -> None:
    parameters = sum(math.prod(shape) for shape in expected_shapes(shape_of(name)).values())
    assert parameters / 1e6 == pytest.approx(millions, rel=1e-3)


def test_one_model_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert models_command.main(["--size", "tiny", "--dtype", "bfloat16", *FLAGS]) == 0
    (row,) = json.loads(capsys.readouterr().out)["models"]
    parameters = sum(math.prod(shape) for shape in expected_shapes(shape_of("tiny")).values())
    assert (row["name"], row["dtype"], row["parameters"]) == ("tiny", "bfloat16", parameters)
    assert row["weight_bytes"] == 2 * parameters and row["kv_bytes_per_token"] == 2 * 2 * 2 * 2 * 8
    assert row["resident_bytes"] > 1 << 20
    assert row["prefill_tokens_per_s"] > 0 and row["decode_tokens_per_s"] > 0


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The processes that would have been started; they are run here instead, where the tiny shapes are known."""
    begun: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        begun.append(command)
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            code = models_command.main(command[4:])
        return subprocess.CompletedProcess(command, code, output.getvalue(), "")

    monkeypatch.setattr(subprocess, "run", run)
    return begun


def test_several_are_measured_in_processes_of_their_own(
    commands: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert models_command.main(["--size", "tiny", "--size", "tiny too", *FLAGS]) == 0
    assert [command[2:5] for command in commands] == [["strata.bench", "models", "--size"]] * 2
    names = [row["name"] for row in json.loads(capsys.readouterr().out)["models"]]
    assert names == ["tiny", "tiny too"]


def test_a_process_that_dies_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    died = subprocess.CompletedProcess([], -9, "", "one\ntwo\nkilled")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: died)
    with pytest.raises(ConfigError, match=r"--size tiny ended with code -9: one\ntwo\nkilled"):
        models_command.main(["--size", "tiny", "--size", "tiny too", *FLAGS])


def test_what_does_not_fit_is_left_out_with_both_numbers(
    commands: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(models_command, "available_memory", lambda: 1 << 30)
    assert models_command.main(["--size", "tiny", "--size", "Mistral-7B-v0.1", *FLAGS]) == 0
    result = json.loads(capsys.readouterr().out)
    why = result["left_out"]["Mistral-7B-v0.1"]
    assert "needs about 3" in why and "1.0 GiB are left" in why
    assert [row["name"] for row in result["models"]] == ["tiny"] and len(commands) == 1
    with pytest.raises(CapacityError, match="Mistral-7B"):
        models_command.main(["--size", "Mistral-7B-v0.1", *FLAGS])
