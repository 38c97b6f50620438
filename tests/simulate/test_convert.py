"""Data sets become workloads: what prompts share stays shared, lengths are counted, and bad records are named."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from strata.errors import ConfigError
from strata.simulate.convert import CharacterEstimate, Conversion, convert, counter_of
from strata.simulate.convert.records import read_records
from strata.simulate.workloads import distinct_tokens, faster, first_requests, workload_file

SHARED_DATA = Path(__file__).parents[2].parent / "shared" / "data"
ESTIMATE = Conversion(CharacterEstimate(1.0))
DOCUMENT_QUESTION = len("\n\nQuestion: ab\nAnswer:")


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def lines(path: Path, *records: Mapping[str, Any]) -> Path:
    return write(path, "".join(json.dumps(record) + "\n" for record in records))


def converted(form: str, path: Path, conversion: Conversion = ESTIMATE) -> list[dict[str, Any]]:
    requests: list[dict[str, Any]] = convert(form, [path], conversion)["requests"]["value"]
    return requests


def ids(request: Mapping[str, Any]) -> list[int]:
    return [segment["id"] for segment in request["prompt"]]


def lengths(request: Mapping[str, Any]) -> list[int]:
    return [segment["tokens"] for segment in request["prompt"]]


@pytest.fixture
def loogle(tmp_path: Path) -> Path:
    """Two documents with two questions each, in both notations, and one without."""
    return lines(
        tmp_path / "loogle.jsonl",
        {"input": "x" * 30, "qa_pairs": [{"Q": "ab", "A": "c"}, {"Q": "abc", "A": "de"}]},
        {"input": "y" * 50, "qa_pairs": "[{'Q': 'ab', 'A': ''}, {'Q': 'ab', 'A': 'xyz'}]"},
        {"input": "z", "qa_pairs": "none"},
    )


def test_questions_about_one_document_share_it_and_nothing_else(loogle: Path) -> None:
    entry = convert("loogle", [loogle], Conversion(CharacterEstimate(1.0), order="maximum"))
    requests = entry["requests"]["value"]
    assert [lengths(request) for request in requests] == [
        [30, DOCUMENT_QUESTION],
        [50, DOCUMENT_QUESTION],
        [30, DOCUMENT_QUESTION + 1],
        [50, DOCUMENT_QUESTION],
    ]
    assert [request["output"] for request in requests] == [1, 1, 2, 3], "an empty answer is one step"
    assert [ids(request)[0] for request in requests] == [0, 1, 0, 1]
    own = [ids(request)[1] for request in requests] + [request["answer"] for request in requests]
    assert len({0, 1, *own}) == 10
    assert entry["statistics"]["contexts"] == 2 and entry["statistics"]["context_tokens"]["mean"] == 40
    assert any("estimate" in note for note in entry["notes"])
    assert any("1 documents without a question" in note for note in entry["notes"])


def test_orders_and_seeds(loogle: Path) -> None:
    def contexts(order: Any, seed: int = 0) -> list[int]:
        conversion = Conversion(CharacterEstimate(1.0), order=order, seed=seed)
        return [ids(request)[0] for request in converted("loogle", loogle, conversion)]

    assert contexts("minimum") == [0, 0, 1, 1]
    assert contexts("shuffle") == contexts("shuffle")
    assert sorted(contexts("shuffle", 3)) == [0, 0, 1, 1]
    assert len({tuple(contexts("shuffle", seed)) for seed in range(20)}) > 1


def test_narrativeqa_as_it_is_published(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    write(
        tmp_path / "documents.csv",
        "document_id,set,kind,story_url\nd1,train,gutenberg,u\nd2,test,movie,u\nd3,test,movie,u\n",
    )
    write(
        tmp_path / "qaps.csv",
        'document_id,set,question,answer1,answer2\nd1,train,ab,"x\ny",z\nd2,test,ab,abcd,z\nd3,test,ab,a,b\n',
    )
    write(tmp_path / "tmp" / "d1.content", "s" * 10)
    write(tmp_path / "tmp" / "d2.content", "s" * 20)
    requests = converted("narrativeqa", tmp_path, Conversion(CharacterEstimate(1.0), order="minimum"))
    assert [(lengths(request)[0], request["output"]) for request in requests] == [(10, 3), (20, 4)]
    of_test = Conversion(CharacterEstimate(1.0), split="test")
    assert [lengths(request)[0] for request in converted("narrativeqa", tmp_path, of_test)] == [20]
    (tmp_path / "tmp" / "d1.content").unlink()
    (tmp_path / "tmp" / "d2.content").unlink()
    with pytest.raises(ConfigError, match=r"download_stories\.sh"):
        converted("narrativeqa", tmp_path)


def narrative_row(document: str, text: str, answer: str) -> dict[str, Any]:
    return {
        "document": {"id": document, "kind": "movie", "text": text},
        "question": {"text": "ab", "tokens": ["ab"]},
        "answers": [{"text": answer, "tokens": []}, {"text": "another", "tokens": []}],
    }


def test_narrativeqa_rows_as_lines_and_as_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        narrative_row("d1", "s" * 10, "x"),
        narrative_row("d2", "t" * 20, "xy"),
        narrative_row("d1", "s" * 10, "xyz"),
    ]
    conversion = Conversion(CharacterEstimate(1.0), order="minimum")
    requests = converted("narrativeqa", lines(tmp_path / "rows.jsonl", *rows), conversion)
    assert [(lengths(request)[0], request["output"]) for request in requests] == [(10, 1), (10, 3), (20, 2)]
    parquet = write(tmp_path / "rows.parquet", "")
    # The library is large and no dependency: what is tested is our side of it.
    monkeypatch.setitem(sys.modules, "pyarrow", types.ModuleType("pyarrow"))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", fake_parquet(rows))
    assert converted("narrativeqa", parquet, conversion) == requests
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ConfigError, match="pip install pyarrow"):
        converted("narrativeqa", parquet, conversion)


def fake_parquet(rows: list[dict[str, Any]]) -> types.ModuleType:
    class Batch:
        def to_pylist(self) -> list[dict[str, Any]]:
            return rows

    class ParquetFile:
        def __init__(self, path: Path) -> None:
            self.path = path

        def __enter__(self) -> ParquetFile:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def iter_batches(self, batch_size: int) -> Iterator[Batch]:
            assert batch_size > 0
            yield Batch()

    module = types.ModuleType("pyarrow.parquet")
    module.ParquetFile = ParquetFile  # type: ignore[attr-defined]
    return module


def test_sharegpt_rounds_continue_each_other(tmp_path: Path) -> None:
    conversations = [
        {"from": "gpt", "value": "left over"},
        {"from": "human", "value": "abc"},
        {"from": "gpt", "value": "defg"},
        {"from": "user", "value": "h"},
        {"from": "human", "value": "i"},
        {"from": "gpt", "value": "jk"},
        {"from": "human", "value": "without an answer"},
    ]
    array = write(
        tmp_path / "sharegpt.json",
        json.dumps([{"id": "1", "conversations": conversations}, {"id": "2", "conversations": []}], indent=1),
    )
    entry = convert("sharegpt", [array], ESTIMATE)
    first, second = entry["requests"]["value"]
    assert (lengths(first), first["output"]) == ([3], 4)
    assert (lengths(second), second["output"]) == ([3, 4, 2], 2)
    assert ids(second)[:2] == [ids(first)[0], first["answer"]]
    assert second["after"] == {"request": 0, "think_s": 60.0} and "after" not in first
    assert entry["rate_of_sessions"] is True
    assert any("1 conversations without" in note for note in entry["notes"])


def test_reviewmt_history_comes_before_the_instruction(tmp_path: Path) -> None:
    paper = {
        "instruction": "decide",
        "input": "now",
        "output": "accept",
        "system": "rules",
        "history": [["the paper", "a review"], ["rebuttal", "ok"]],
    }
    entry = convert("reviewmt", [write(tmp_path / "review.json", json.dumps([paper]))], ESTIMATE)
    requests = entry["requests"]["value"]
    assert [lengths(request) for request in requests] == [
        [5, 9],
        [5, 9, 8, 8],
        [5, 9, 8, 8, 2, len("decide\nnow")],
    ]
    assert [request["output"] for request in requests] == [8, 2, 6]
    assert [request.get("after", {}).get("request") for request in requests] == [None, 0, 1]
    assert entry["rate_of_sessions"] is False


def test_mooncake_blocks_stay_shared(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "trace.jsonl",
        {"timestamp": 3000, "input_length": 600, "output_length": 5, "hash_ids": [7, 9]},
        {"timestamp": 1000, "input_length": 1024, "output_length": 3, "hash_ids": [7, 8]},
    )
    entry = convert("mooncake", [path], Conversion(CharacterEstimate(), time_scale=0.5))
    records = entry["records"]["value"]
    assert [(record["timestamp"], record["hash_ids"]) for record in records] == [(0, [7, 8]), (2000, [7, 9])]
    assert entry["time_scale"] == 0.5 and entry["block_tokens"] == 512
    assert entry["statistics"]["repeated_share"] == round(512 / 1624, 4)
    assert not any("token" in note for note in entry["notes"]), "nothing was counted"
    assert distinct_tokens(workload_file(path)) == 512 + 512 + 88 + 8


def test_large_arrays_are_read_piece_by_piece(tmp_path: Path) -> None:
    values = [{"conversations": [], "id": "{[," * 5 + "x" * 700_000} for _ in range(4)]
    path = write(tmp_path / "large.json", json.dumps(values, indent=2))
    records = list(read_records(path, "large"))
    assert [record.fields for record in records] == values
    assert [record.place.number for record in records] == [2, 6, 10, 14]


@pytest.mark.parametrize(
    ("form", "text", "complaint"),
    [
        ("loogle", '{"input": "x", "qa_pairs": []}\n{"input": 5}', "line 2: `input` is 5"),
        ("loogle", '{"input": "x", "qa_pairs": [{"A": "y"}]}', "line 1: `Q` is missing"),
        ("loogle", '{"input": "x", "qa_pairs": "[{"}', "line 1: `qa_pairs` is a text that neither"),
        ("loogle", "\nnonsense", "line 2: no JSON"),
        ("narrativeqa", '{"document": {"id": "d"}}', "line 1: `text` is missing"),
        ("sharegpt", '[{"conversations": []},\n {"conversations": 3}]', "line 2: `conversations` is 3"),
        ("sharegpt", '[{"conversations": [{"from": "moon", "value": ""}]}]', "from` is 'moon', none of"),
        ("sharegpt", '[{"conversations": []},\n\n {"conversations": [}]', "line 3: no JSON"),
        ("sharegpt", "[5]", "line 1: a JSON int, not an object"),
        ("reviewmt", '[{"instruction": "a", "output": "b", "history": [["a"]]}]', "`history[0]` is no pair"),
        (
            "mooncake",
            '{"timestamp": -1, "input_length": 1, "output_length": 1, "hash_ids": [1]}',
            "`timestamp`",
        ),
        (
            "mooncake",
            '{"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": [1]}',
            "`input_length`",
        ),
        (
            "mooncake",
            '{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}',
            "have 2 blocks",
        ),
        (
            "mooncake",
            '{"timestamp": 0, "input_length": 6, "output_length": 1, "hash_ids": ["a"]}',
            "`hash_ids[0]`",
        ),
        (
            "mooncake",
            '{"timestamp": 0, "input_length": 6.5, "output_length": 1, "hash_ids": [1]}',
            "whole number",
        ),
        ("mooncake", "", "no request was found"),
        ("sharegpt", "[]", "no conversation"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, form: str, text: str, complaint: str) -> None:
    path = write(tmp_path / "broken.json", text)
    with pytest.raises(ConfigError) as raised:
        convert(form, [path], ESTIMATE)
    assert complaint in str(raised.value) and str(path) in str(raised.value)


def test_a_row_of_another_width_is_named(tmp_path: Path) -> None:
    write(tmp_path / "qaps.csv", "document_id,question,answer1\nd,q\n")
    with pytest.raises(ConfigError, match=r"qaps\.csv, line 2: not the 3 fields"):
        convert("narrativeqa", [tmp_path], ESTIMATE)


def test_tokens_are_the_tokenizers(tmp_path: Path, loogle: Path) -> None:
    fast = Tokenizer(WordLevel({"x": 0, "?": 1}, unk_token="?"))
    fast.pre_tokenizer = Whitespace()
    fast.save(str(tmp_path / "tokenizer.json"))
    entry = convert("loogle", [loogle], Conversion(counter_of(tmp_path, None)))
    assert entry["statistics"]["context_tokens"]["most"] == 1, "a word a document"
    assert any("tokenizer.json" in note for note in entry["notes"])
    assert not any(str(tmp_path.parent) in note for note in entry["notes"])
    with pytest.raises(ConfigError, match="one of the two"):
        counter_of(tmp_path, 4.0)
    with pytest.raises(ConfigError, match="does not exist"):
        counter_of(tmp_path / "other", None)
    with pytest.raises(ConfigError, match="no readable tokenizer"):
        counter_of(write(tmp_path / "broken.json", "{}"), None)
    with pytest.raises(ConfigError, match="--characters-per-token 0"):
        counter_of(None, 0.01)


def test_what_cannot_be_asked_for_is_named(loogle: Path) -> None:
    with pytest.raises(ConfigError, match="--most-requests 0"):
        Conversion(CharacterEstimate(), most_requests=0)
    with pytest.raises(ConfigError, match="--think-time -1"):
        Conversion(CharacterEstimate(), think_s=-1.0)
    with pytest.raises(ConfigError, match="--time-scale 0"):
        Conversion(CharacterEstimate(), time_scale=0.0)
    with pytest.raises(ConfigError, match="--format tapes"):
        convert("tapes", [loogle], ESTIMATE)
    with pytest.raises(ConfigError, match="does not exist"):
        convert("loogle", [loogle.parent / "other"], ESTIMATE)


def test_a_converted_file_is_a_workload(tmp_path: Path, loogle: Path) -> None:
    output = tmp_path / "out.json"
    command = [sys.executable, "-m", "strata.simulate.convert", "--format", "loogle", str(loogle)]
    done = subprocess.run(
        [*command, "--output", str(output), "--characters-per-token", "1", "--most-requests", "3"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert json.loads(done.stdout)["statistics"]["requests"] == 3
    workload = workload_file(output)
    assert workload["kind"] == "explicit" and len(workload["requests"]) == 3
    assert set(workload) == {"kind", "requests"}
    at_rate = {**workload, "rate": 2.0}
    assert faster(at_rate, 3.0)["rate"] == 6.0
    assert len(first_requests(workload, 2)["requests"]) == 2
    refused = subprocess.run(
        [*command, "--output", str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert refused.returncode == 1 and "error: --output" in refused.stderr


def test_the_simulator_takes_a_converted_file(tmp_path: Path, loogle: Path) -> None:
    output = write(tmp_path / "out.json", json.dumps(convert("loogle", [loogle], ESTIMATE)))
    names = ["--hardware", "h200", "--model", "llama-3.1-8b", "--system", "ours", "--workload", str(output)]
    done = subprocess.run(
        [sys.executable, "-m", "strata.simulate", *names, "--rate", "0.5", "--json", "-"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    result = json.loads(done.stdout)
    assert result["report"]["finished"] == 4 and result["report"]["refused"] == 0
    # Four arrivals at one in two seconds, by chance.
    assert result["report"]["duration_s"] > 1.0
    sources = result["report"]["prompt_tokens"]
    assert sum(sources.values()) == result_tokens(output)


def result_tokens(path: Path) -> int:
    return sum(
        segment["tokens"] for request in workload_file(path)["requests"] for segment in request["prompt"]
    )


def test_workload_files_of_other_kinds(tmp_path: Path) -> None:
    lines(tmp_path / "t.jsonl", {"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [3]})
    entry = write(tmp_path / "t.json", '{"kind": "trace", "path": "t.jsonl", "time_scale": 2.0}')
    workload = workload_file(entry)
    assert len(workload["records"]) == 1 and "path" not in workload
    assert faster(workload, 4.0)["time_scale"] == 0.5
    with pytest.raises(ConfigError, match="not more than 0"):
        faster(workload, 0.0)
    law = {"law": "constant", "mean": 10}
    drawn = {
        "kind": "documents",
        "contexts": {"value": 4, "unit": "documents", "source": "a test"},
        "queries": 8,
        **{f"{name}_tokens": law for name in ("context", "question", "output")},
        "order": "shuffle",
    }
    workload = workload_file(write(tmp_path / "d.json", json.dumps(drawn)))
    assert workload["contexts"] == 4 and distinct_tokens(workload) == 4 * 10 + 8 * 20
    with pytest.raises(ConfigError, match="drawn, not listed"):
        first_requests(workload, 5)
    for text, complaint in (("{", "as JSON"), ("[]", "`kind` is None"), ('{"kind": "x"}', "`kind` is 'x'")):
        with pytest.raises(ConfigError, match=complaint):
            workload_file(write(tmp_path / "broken.json", text))
    with pytest.raises(ConfigError, match=r"--trace .* does not exist"):
        workload_file(tmp_path / "none.json", flag="--trace")


@pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="the public samples are not on this machine")
def test_the_real_samples() -> None:
    entry = convert(
        "loogle", [SHARED_DATA / "loogle_sample_longdep_qa.jsonl"], Conversion(CharacterEstimate())
    )
    assert entry["statistics"]["contexts"] == 5 and entry["statistics"]["requests"] == 43
    # The paper's mean over all of LooGLE is 21,613; five documents come near it.
    assert 15_000 < entry["statistics"]["prompt_tokens"]["mean"] < 28_000
    entry = convert("mooncake", [SHARED_DATA / "mooncake_conversation_trace.jsonl"], ESTIMATE)
    assert entry["statistics"]["requests"] == 12_031
    assert 0.3 < entry["statistics"]["repeated_share"] < 0.5
