"""Documents are read in LooGLE's form or refused with the line; prompts have the length that was asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_bench import CharacterTokenizer, write_lines

from strata.bench.corpus import Document, default_documents, make_prompts, read_documents
from strata.errors import ConfigError

ENCODER = CharacterTokenizer()
PAIRS_AS_PYTHON = "[{'Q': 'Who?', 'A': 'She.', 'S': ['x']}, {'Q': 'When?', 'A': '1919', 'S': []}]"
PAIRS_AS_JSON = '[{"Q": "Who?"}, {"Q": "When?"}]'


@pytest.mark.parametrize("pairs", [PAIRS_AS_PYTHON, PAIRS_AS_JSON, [{"Q": "Who?"}, {"Q": "When?"}]])
def test_questions_are_read_however_they_are_written(tmp_path: Path, pairs: Any) -> None:
    path = write_lines(tmp_path / "docs.jsonl", [{"input": "Text.", "title": "T", "qa_pairs": pairs}])
    assert read_documents(path) == [Document("T", "Text.", ("Who?", "When?"))]


@pytest.mark.parametrize("pairs", ["none", "None", None, []])
def test_a_document_without_questions_gets_a_general_one(tmp_path: Path, pairs: Any) -> None:
    path = write_lines(tmp_path / "docs.jsonl", [{"input": "Text.", "title": "T", "qa_pairs": pairs}])
    (document,) = read_documents(path)
    assert len(document.questions) == 1


@pytest.mark.parametrize(
    ("second_line", "complaint"),
    [
        ("{", "no JSON"),
        ("[1]", "not an object"),
        ('{"title": "T"}', "`input` is not a text"),
        ('{"input": "  "}', "`input` is not a text"),
        ('{"input": "x", "qa_pairs": 5}', "is a int, not a list"),
        ('{"input": "x", "qa_pairs": "what?"}', "neither JSON nor Python"),
        ('{"input": "x", "qa_pairs": [{"A": "y"}]}', "without a question"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, second_line: str, complaint: str) -> None:
    path = tmp_path / "docs.jsonl"
    path.write_text('{"input": "x", "qa_pairs": "none"}\n' + second_line + "\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"--docs .*docs\.jsonl, line 2: ") as raised:
        read_documents(path)
    assert complaint in str(raised.value) and "LooGLE" in str(raised.value)


def test_a_missing_and_an_empty_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_documents(tmp_path / "nowhere.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="holds no document"):
        read_documents(tmp_path / "empty.jsonl")


def test_prompts_have_their_length_and_a_text_each() -> None:
    documents = [
        Document("A", "abcdefghij" * 60, ("Who?", "When was it?")),
        Document("B", "uvw" * 300, ("Why?",)),
    ]
    prompts = make_prompts(documents, ENCODER, tokens=200, count=4, questions=3)
    assert [prompt.title for prompt in prompts] == ["A", "B", "A", "B"]
    for prompt in prompts:
        assert len(prompt.token_ids) == 200
        assert len(prompt.follow_ups) == 2
        shared = 200 - len("\n\nQuestion: When was it?\nAnswer:")
        assert all(other[:shared] == prompt.token_ids[:shared] for other in prompt.follow_ups)
    asked = ENCODER.encode("\n\nQuestion: Who?\nAnswer:")
    assert prompts[0].token_ids[-len(asked) :] == asked


def test_too_little_text_and_too_short_prompts_are_refused() -> None:
    documents = [Document("A", "abc" * 100, ("Who?",))]
    with pytest.raises(ConfigError, match=r"hold 1 pieces of --tokens 200, and --pairs asks for 2"):
        make_prompts(documents, ENCODER, tokens=200, count=2, questions=1)
    with pytest.raises(ConfigError, match="--tokens 30 leaves too little room"):
        make_prompts(documents, ENCODER, tokens=30, count=1, questions=1)


def test_every_python_brings_enough_text_for_the_default() -> None:
    (document,) = default_documents()
    # English text has at least three characters a token with any usual tokenizer's vocabulary of prose.
    assert len(document.text) > 7 * 4000 * 6
    assert document.questions
