"""Questions about long documents: LooGLE and NarrativeQA. A document is counted once, however many ask about it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from strata.bench.corpus import parse_literal
from strata.errors import ConfigError
from strata.simulate.convert.entry import Context, Round, document_requests, statistics_of
from strata.simulate.convert.options import Conversion, Converted
from strata.simulate.convert.records import Record, read_records

LOOGLE_FORM = "in LooGLE's form: a JSON object with `input` and `qa_pairs`, whose entries have `Q` and `A`"
NARRATIVEQA_FORM = (
    "in NarrativeQA's form: `document` with `id` and `text`, `question` and each of `answers` with `text`"
)
_DOCUMENTS_FORM = "as documents.csv has them: `document_id`, `set`"
_QUESTIONS_FORM = "as qaps.csv has them: `document_id`, `set`, `question`, `answer1`"
_QUESTION = "\n\nQuestion: {}\nAnswer:"
_TEMPLATE_NOTE = (
    "a prompt is the document, then `Question: ...` and `Answer:`; no instruction before the document"
)


def loogle(inputs: Sequence[Path], conversion: Conversion) -> Converted:
    """LooGLE's files, long or short dependency. Raises ConfigError."""
    contexts: list[Context] = []
    unasked = 0
    for path in inputs:
        for record in read_records(path, LOOGLE_FORM):
            if len(contexts) == conversion.most_contexts:
                break
            text, pairs = record.text("input"), _pairs(record)
            if not pairs:
                unasked += 1
                continue
            contexts.append(_context(conversion, text, pairs))
    notes = (f"{unasked} documents without a question were left out",) if unasked else ()
    return _converted(contexts, conversion, inputs, notes)


def _pairs(record: Record) -> list[tuple[str, str]]:
    """The questions and answers of LooGLE, whose lists are texts in Python's or JSON's notation."""
    value: Any = record.fields.get("qa_pairs")
    if isinstance(value, str):
        value = _parsed(record, value)
    if value is None:
        return []
    if not isinstance(value, list):
        raise record.refuse(f"`qa_pairs` is a {type(value).__name__}, not a list")
    entries = [record.within("qa_pairs", index, each) for index, each in enumerate(value)]
    return [(entry.text("Q"), str(entry.fields.get("A", ""))) for entry in entries]


def _parsed(record: Record, text: str) -> Any:
    if text.strip().lower() in ("", "none"):
        return None
    try:
        return parse_literal(text)
    except ValueError as error:
        raise record.refuse(f"`qa_pairs` {error}") from error


def narrativeqa(inputs: Sequence[Path], conversion: Conversion) -> Converted:
    """NarrativeQA: the published folder (documents.csv, qaps.csv, stories under tmp/), or rows of the hub's data set as
    JSON lines or Parquet. Raises ConfigError."""
    contexts: list[Context] = []
    notes: tuple[str, ...] = ()
    for path in inputs:
        if path.is_dir():
            found, notes = _folder(path, conversion, len(contexts))
            contexts += found
        else:
            contexts += _rows(path, conversion, len(contexts))
    return _converted(contexts[: conversion.most_contexts], conversion, inputs, notes)


def _folder(path: Path, conversion: Conversion, taken: int) -> tuple[list[Context], tuple[str, ...]]:
    questions: dict[str, list[tuple[str, str]]] = {}
    for record in read_records(path / "qaps.csv", _QUESTIONS_FORM):
        pair = (record.text("question"), record.text("answer1"))
        questions.setdefault(record.text("document_id"), []).append(pair)
    contexts: list[Context] = []
    missing = 0
    for record in read_records(path / "documents.csv", _DOCUMENTS_FORM):
        if conversion.most_contexts is not None and taken + len(contexts) >= conversion.most_contexts:
            break
        name = record.text("document_id")
        if conversion.split is not None and record.text("set") != conversion.split:
            continue
        story = path / "tmp" / f"{name}.content"
        if story.is_file() and name in questions:
            text = story.read_text(encoding="utf-8", errors="replace")
            contexts.append(_context(conversion, text, questions[name]))
        else:
            missing += 1
    if not contexts:
        raise ConfigError(
            f"{path} holds none of the stories that documents.csv names{_of_split(conversion)}: run "
            "download_stories.sh there, which fills tmp/"
        )
    notes = ["stories are counted as they were downloaded, with licences and markup"]
    if missing:
        notes.append(f"{missing} documents without a story under tmp/ or without a question were left out")
    return contexts, tuple(notes)


def _of_split(conversion: Conversion) -> str:
    return "" if conversion.split is None else f" with --split {conversion.split}"


def _rows(path: Path, conversion: Conversion, taken: int) -> Iterator[Context]:
    """Rows repeat their document's text: it is counted where it first comes."""
    tokens: dict[str, int] = {}
    rounds: dict[str, list[Round]] = {}
    for record in read_records(path, NARRATIVEQA_FORM):
        document = record.part("document")
        name = document.text("id")
        if name not in tokens:
            if conversion.most_contexts is not None and taken + len(tokens) >= conversion.most_contexts:
                continue
            tokens[name] = conversion.counter.count(document.text("text"))
        answers = record.items("answers")
        answer = record.within("answers", 0, answers[0]).text("text") if answers else ""
        pair = (record.part("question").text("text"), answer)
        rounds.setdefault(name, []).append(_round(conversion, pair))
    for name, count in tokens.items():
        yield Context(count, tuple(rounds[name]))


def _round(conversion: Conversion, pair: tuple[str, str]) -> Round:
    question, answer = pair
    counter = conversion.counter
    return Round(counter.count(_QUESTION.format(question)), counter.count(answer))


def _context(conversion: Conversion, text: str, pairs: Sequence[tuple[str, str]]) -> Context:
    return Context(conversion.counter.count(text), tuple(_round(conversion, pair) for pair in pairs))


def _converted(
    contexts: Sequence[Context], conversion: Conversion, inputs: Sequence[Path], notes: Sequence[str]
) -> Converted:
    if not contexts:
        names = ", ".join(map(str, inputs))
        raise ConfigError(f"{names}: no document with a question was found; give files that hold some")
    requests = document_requests(contexts, conversion.order, conversion.seed)[: conversion.most_requests]
    return Converted(
        {"kind": "explicit", "requests": requests},
        statistics_of(contexts, requests),
        (
            *notes,
            _TEMPLATE_NOTE,
            f"order: {conversion.order}, seed {conversion.seed}; the simulator's rate sets the arrivals, without one "
            "all come at once",
        ),
    )
