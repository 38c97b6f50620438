"""The step log says what the counters say, ends with the engine, and is refused where it cannot be written."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from engine_harness import MakeEngine, ask, wait_idle

from strata.config import StrataConfig
from strata.engine.step_log import StepLog
from strata.errors import ConfigError
from strata.simulate.step_log import read_step_log

PROMPT = [(5 * place + 1) % 97 for place in range(70)]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_the_lines_add_up_to_the_counters(make_engine: MakeEngine, tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    engine = make_engine(step_log=str(path), batch_tokens=32, api_key="secret", write_policy="through")
    ask(engine, PROMPT, 5)
    wait_idle(engine)
    engine.demote(["device"])
    answer = ask(engine, [*PROMPT, 1, 2, 3], 4)
    wait_idle(engine)
    stats = engine.stats()
    engine.shutdown(drain_s=0.0, demote_s=0.0)
    found = lines(path)
    steps = [line for line in found if line.get("kind") in ("prefill", "decode")]

    def total(name: str, kind: str | None = None) -> float:
        return sum(step[name] for step in steps if kind in (None, step["kind"]))

    assert sum(step["kind"] == "prefill" for step in steps) == stats["prefill_forwards"]
    assert sum(step["kind"] == "decode" for step in steps) == stats["decode_forwards"]
    assert len(steps) == stats["plans"] - stats["plans_discarded"]
    assert total("tokens", "prefill") == stats["prompt_tokens_computed"] == stats["prefilled_tokens"]
    assert total("sampled") == stats["generated_tokens"] == 9
    assert total("tokens", "decode") == total("rows", "decode") == 9 - 2
    assert answer.sources[1] > 0 and total("loaded_tokens") == stats["prompt_tokens_host"]
    # The first prompt in chunks of 32 without context, and what each later token attends to.
    first = steps[0]
    assert (first["tokens"], first["context"], first["pairs"], first["rows"]) == (32, 0, 32 * 33 // 2, 1)
    decodes = [step for step in steps if step["kind"] == "decode"]
    assert all(step["pairs"] == step["context"] + step["tokens"] for step in decodes)
    assert total("stalled_s") == pytest.approx(stats["load_stall_ns"] / 1e9, abs=1e-6)
    assert all(step["busy_s"] > 0 and step["rest_s"] >= 0 for step in steps)
    assert [step["at_s"] for step in steps] == sorted(step["at_s"] for step in steps)
    moved = [line for line in found if line.get("kind") == "transfers"][-1]
    assert moved["load"]["bytes"] == stats["load_bytes"] > 0
    assert moved["backup"]["completed"] == stats["backup_completed"] > 0
    assert found[-1] == {"kind": "end", "left_out": 0}


def test_the_first_line_says_which_server_it_was(make_engine: MakeEngine, tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    engine = make_engine(step_log=str(path), api_key="secret")
    ask(engine, PROMPT, 2)
    engine.shutdown(drain_s=0.0, demote_s=0.0)
    log = read_step_log(path)
    assert log.header["pages"]["device"] == 100 and log.header["pages"]["host"] == 256
    assert log.header["model"]["layers"] == 3 and log.header["dtype"] == "float64"
    assert log.header["settings"]["scheduler"]["batch_tokens"] == 512
    assert log.header["settings"]["cache"]["page_size"] == 4
    assert len(log) == 2 and log.left_out == 0
    text = path.read_text(encoding="utf-8")
    assert "secret" not in text and str(tmp_path) not in text


def test_a_full_buffer_is_counted(
    monkeypatch: pytest.MonkeyPatch, make_engine: MakeEngine, tmp_path: Path
) -> None:
    path = tmp_path / "steps.jsonl"
    monkeypatch.setattr("strata.engine.step_log._MOST_LINES", 0)
    engine = make_engine(step_log=str(path))
    ask(engine, PROMPT, 3)
    engine.shutdown(drain_s=0.0, demote_s=0.0)
    assert lines(path)[-1] == {"kind": "end", "left_out": 3}


def test_without_the_flag_nothing_is_written(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine()
    ask(engine, PROMPT, 2)
    engine.shutdown(drain_s=0.0, demote_s=0.0)
    assert [path.name for path in tmp_path.iterdir()] == ["kv"]
    assert StrataConfig().server.step_log == ""


def test_a_path_that_cannot_be_written_is_refused(make_engine: MakeEngine, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--step-log .*missing/log cannot be written.*leave the flag out"):
        make_engine(step_log=str(tmp_path / "missing" / "log"))
    with pytest.raises(ConfigError, match="--step-log"):
        StepLog(str(tmp_path))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full, a disk that is always full")
def test_a_full_disk_does_not_stop_the_engine(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(step_log="/dev/full")
    assert len(ask(engine, PROMPT, 3).tokens) == 3
    engine.shutdown(drain_s=0.0, demote_s=0.0)
    assert "--step-log /dev/full: writing has stopped" in caplog.text
