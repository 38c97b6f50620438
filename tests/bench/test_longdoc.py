"""The whole measurement on a tiny model: every answer from the tier that was meant, one JSON object, clear refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_bench import tiny_served, write_lines

from strata.bench import longdoc_command
from strata.bench.__main__ import main as bench_main
from strata.bench.longdoc import LongDoc, Round, Shape, bounds_of, summarise
from strata.bench.reference import BareReference
from strata.bench.report import progress_steps
from strata.bench.target import Answer, EngineTarget
from strata.cli.main import COMMANDS
from strata.config import StrataConfig
from strata.engine import TokenSources
from strata.errors import ConfigError, StorageError

SIZES = ["--tokens", "200", "--device-memory", "2MiB", "--host-memory", "4MiB", "--disk-capacity", "64MiB"]
# The tiny model computes 200 tokens about as quickly as they load: which of the two is done must not be left to chance.
FLAGS = [*SIZES, "--load-policy", "always", "--prefetch-policy", "wait"]
PROMISED = (
    "tokens",
    "reference_prefill_s",
    "cold_ttft_s",
    "device_ttft_s",
    "host_ttft_s",
    "disk_ttft_s",
    "kv_bytes",
    "copy_gbps",
    "disk_gbps",
)


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    """Two documents in LooGLE's form, each with text for two prompts."""
    text = "".join(f"{number} green bottles stood on the wall. " for number in range(60))
    records = [
        {"input": f"{name} {text}", "title": name, "qa_pairs": "[{'Q': 'How many?'}, {'Q': 'Where?'}]"}
        for name in ("one", "two")
    ]
    return write_lines(tmp_path / "docs.jsonl", records)


def run(documents: Path, disk: Path, *more: str) -> int:
    """The command on the tiny model."""
    arguments = ["--docs", str(documents), "--disk-path", str(disk), *FLAGS, *more]
    return longdoc_command.main(arguments, load=tiny_served)


def test_json_has_every_promised_number_and_nothing_else_is_on_stdout(
    documents: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(documents, tmp_path / "kv", "--pairs", "3", "--json", "-") == 0
    shown = capsys.readouterr()
    result = json.loads(shown.out)
    assert set(PROMISED) <= set(result)
    assert all(isinstance(result[name], int | float) and result[name] > 0 for name in PROMISED)
    assert result["tokens"] == 200
    # 199 of 200 tokens may be found: 12 whole pages of 16.
    token_bytes = 3 * 2 * 2 * 8 * 8
    assert result["kv_bytes"] == 12 * 16 * token_bytes
    assert result["computed_tokens"] == 200 - 12 * 16
    assert result["tokens_equal"] and result["reference_token_equal"]
    assert len(result["rounds"]) == 3
    assert [this["title"] for this in result["rounds"]] == ["one", "two", "one"]
    assert {bound["name"] for bound in result["bounds"]} == {"cold", "device hit", "host hit", "disk hit"}
    for bound in result["bounds"]:
        assert bound["holds"] == (bound["value"] <= bound["bound"])
    facts = result["manifest"]
    assert facts["model"] == "tiny" and facts["settings"]["page_size"] == 16
    assert "bare forward" in facts["reference"]
    assert "disk_path" not in facts["settings"] and "api_key" not in facts["settings"]
    assert "device hit" in shown.err


def test_tiers_that_are_off_are_left_out(documents: Path, tmp_path: Path) -> None:
    target = tmp_path / "result.json"
    arguments = ("--disk-capacity", "0", "--pairs", "1", "--questions", "1", "--json", str(target))
    assert run(documents, tmp_path / "kv", *arguments) == 0
    result = json.loads(target.read_text(encoding="utf-8"))
    assert result["host_ttft_s"] > 0 and result["copy_gbps"] > 0
    assert result["disk_ttft_s"] is None and result["disk_gbps"] is None
    assert result["follow_up_ttft_s"] is None
    assert run(documents, tmp_path / "kv", "--host-memory", "0", "--pairs", "1", "--json", str(target)) == 0
    result = json.loads(target.read_text(encoding="utf-8"))
    assert result["host_ttft_s"] is None and result["disk_ttft_s"] is None and result["device_ttft_s"] > 0


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--pairs", "0"), "--pairs 0 is too small"),
        (("--tokens", "8"), "--tokens 8 is too small"),
        (("--device-memory", "64KiB"), "--device-memory 64 KiB is too small"),
        (("--host-memory", "64KiB"), "--host-memory 64 KiB is too small"),
        (("--json", "/no/such/folder/x.json"), "its folder does not exist"),
        (("--pairs", "99"), "--pairs asks for 99"),
    ],
)
def test_what_cannot_be_measured_is_refused_at_once(
    documents: Path, tmp_path: Path, flags: tuple[str, ...], complaint: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        run(documents, tmp_path / "kv", *flags)
    assert complaint in str(raised.value)


def test_a_folder_that_is_in_use_is_never_emptied(documents: Path, tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv" / "somebody's").write_text("pages", encoding="utf-8")
    with pytest.raises(ConfigError, match="holds files, and a measurement empties its disk tier"):
        run(documents, tmp_path / "kv")
    assert (tmp_path / "kv" / "somebody's").read_text(encoding="utf-8") == "pages"


def test_the_disk_tier_is_a_new_folder_that_is_removed(
    documents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    mine = tmp_path / "cache" / "strata" / "kv"
    mine.mkdir(parents=True)
    (mine / "pages").write_text("kept", encoding="utf-8")
    target = tmp_path / "result.json"
    arguments = ["--docs", str(documents), *FLAGS, "--pairs", "1", "--json", str(target)]
    assert longdoc_command.main(arguments, load=tiny_served) == 0
    assert json.loads(target.read_text(encoding="utf-8"))["disk_ttft_s"] > 0
    assert [path.name for path in (tmp_path / "cache" / "strata").iterdir()] == ["kv"]
    assert (mine / "pages").read_text(encoding="utf-8") == "kept"


SHAPE = Shape(
    tokens=40,
    max_tokens=2,
    page_size=16,
    page_bytes=12288,
    host=True,
    disk=False,
    copy_threads=1,
    disk_threads=1,
)


class WrongTierTarget:
    """Answers as if everything had come from the device."""

    def ask(self, token_ids: Any, max_tokens: int) -> Answer:
        """Nothing is ever computed but the rest of the last page."""
        return Answer(0.1, (1, 2), TokenSources(device=32, computed=8))

    def settle(self) -> None:
        """Nothing runs."""

    def demote(self, tiers: Any) -> None:
        """Nothing moves."""

    def flush(self) -> None:
        """Nothing is forgotten."""

    def restart(self) -> None:
        """Nothing stops."""

    def close(self) -> None:
        """Nothing is open."""


def test_an_answer_from_another_tier_is_an_error_not_a_number(tmp_path: Path) -> None:
    bench = LongDoc(WrongTierTarget(), BareReference(tiny_served().model), SHAPE)
    prompt = longdoc_command.make_prompts(
        [longdoc_command.default_documents()[0]], tiny_served().tokenizer, 400, 1, 1
    )[0]
    short = replace(prompt, token_ids=prompt.token_ids[:40])
    with (
        progress_steps(4) as steps,
        pytest.raises(StorageError, match="40 of 40 prompt tokens were to be computed"),
    ):
        bench.run(0, short, steps, tmp_path)


def test_sources_sum_to_the_prompt_in_every_state(tmp_path: Path) -> None:
    config = StrataConfig.of(
        disk_path=tmp_path / "kv", device_memory="2MiB", host_memory="4MiB", disk_capacity="64MiB"
    )
    target = EngineTarget(config, tiny_served())
    prompt = [(7 * position) % 97 for position in range(100)]
    try:
        answers = [target.ask(prompt, 3)]
        target.settle()
        answers.append(target.ask(prompt, 3))
        target.settle()
        target.demote(["device"])
        answers.append(target.ask(prompt, 3))
        target.settle()
        target.restart()
        answers.append(target.ask(prompt, 3))
        target.settle()
        target.restart()
        size, seconds = target.read_from_disk(prompt, 6)
    finally:
        target.close()
    assert [answer.sources for answer in answers] == [
        TokenSources(computed=100),
        TokenSources(device=96, computed=4),
        TokenSources(host=96, computed=4),
        TokenSources(disk=96, computed=4),
    ]
    assert len({answer.tokens for answer in answers}) == 1 and len(answers[0].tokens) == 3
    assert size == 6 * 16 * 3 * 2 * 2 * 8 * 8 and seconds > 0


def test_medians_and_bounds_follow_the_rounds() -> None:
    shape = replace(SHAPE, disk=True)
    rounds = [
        Round(
            "t",
            reference_prefill_s=2.0,
            cold_ttft_s=cold,
            device_ttft_s=0.1,
            bare_forward_s=0.08,
            host_ttft_s=0.1 + 1.2 * shape.kv_bytes / 4e9,
            disk_ttft_s=0.2,
            disk_read_s=0.01,
            copy_streaming_gbps=3.0,
            copy_threaded_gbps=4.0,
        )
        for cold in (1.0, 2.0, 9.0)
    ]
    summary = summarise(rounds, shape)
    assert summary["cold_ttft_s"] == 2.0
    assert summary["copy_gbps"] == 4.0, "the faster yardstick is the one that counts"
    assert summary["disk_gbps"] == pytest.approx(shape.kv_bytes / 0.01 / 1e9)
    verdicts = {bound.name: bound.holds for bound in bounds_of(summary)}
    assert verdicts == {"cold": True, "device hit": True, "host hit": True, "disk hit": False}


def test_the_command_is_reached_from_both_entries(capsys: pytest.CaptureFixture[str]) -> None:
    assert COMMANDS["bench"][0] == "strata.bench.__main__"
    assert bench_main([]) == 2 and "no measurement given" in capsys.readouterr().err
    assert bench_main(["--help"]) == 0
    assert {"longdoc", "tree", "decode"} <= set(capsys.readouterr().out.split())
    assert bench_main(["longdoc", "--docs", "/no/such/file"]) == 1
    shown = capsys.readouterr()
    assert "error: --docs /no/such/file cannot be read" in shown.err and not shown.out
