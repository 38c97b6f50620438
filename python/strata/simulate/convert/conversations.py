"""Conversations of several rounds: ReviewMT and ShareGPT. Each round's prompt continues the one before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from strata.errors import ConfigError
from strata.simulate.convert.entry import Context, Round, conversation_requests, statistics_of
from strata.simulate.convert.options import Conversion, Converted
from strata.simulate.convert.records import Record, read_records

REVIEWMT_FORM = (
    "in ReviewMT's form: `instruction`, `input`, `output`, `system`, and `history`, a list of pairs of texts; or "
    "`conversations`, a list of `from` and `value`"
)
SHAREGPT_FORM = "in ShareGPT's form: `conversations`, a list of objects with `from` and `value`"
SHAREGPT_THINK_S = 60.0
_ROLES = {
    "human": "question",
    "user": "question",
    "gpt": "answer",
    "chatgpt": "answer",
    "assistant": "answer",
    "bing": "answer",
    "bard": "answer",
    "system": "opening",
}

Said = tuple[str, list[tuple[str, str]]]
"""What a conversation begins with, and its questions and answers."""


def sharegpt(inputs: Sequence[Path], conversion: Conversion) -> Converted:
    """ShareGPT_V3's array, or the same objects as JSON lines. Raises ConfigError."""
    think_s = SHAREGPT_THINK_S if conversion.think_s is None else conversion.think_s
    return _converted(inputs, conversion, SHAREGPT_FORM, turns_of, think_s, by_session=True)


def reviewmt(inputs: Sequence[Path], conversion: Conversion) -> Converted:
    """ReviewMT's arrays: the paper is part of the first question. Raises ConfigError."""
    think_s = 0.0 if conversion.think_s is None else conversion.think_s
    return _converted(inputs, conversion, REVIEWMT_FORM, _dialogue, think_s, by_session=False)


def turns_of(record: Record) -> Said:
    """Questions and answers of `conversations`. What precedes the first question, and a question without an answer, is
    left out; what one side says in a row is one turn."""
    opening, pairs, asked, answered = "", [], "", ""
    for index, each in enumerate(record.items("conversations")):
        turn = record.within("conversations", index, each)
        role = _ROLES.get(turn.text("from"))
        if role is None:
            known = ", ".join(sorted(_ROLES))
            raise record.refuse(f"`conversations[{index}].from` is {turn.text('from')!r}, none of {known}")
        value = turn.text("value", may_be_empty=True)
        if role == "opening":
            opening += value
        elif role == "answer":
            answered += value if asked else ""
        else:
            if answered:
                pairs.append((asked, answered))
                asked, answered = "", ""
            asked += value
    if asked and answered:
        pairs.append((asked, answered))
    return opening, pairs


def _dialogue(record: Record) -> Said:
    if "conversations" in record.fields:
        return turns_of(record)
    pairs = []
    history = record.items("history") if record.fields.get("history") is not None else []
    for index, pair in enumerate(history):
        if (
            not isinstance(pair, list | tuple)
            or len(pair) != 2
            or not all(isinstance(each, str) for each in pair)
        ):
            raise record.refuse(f"`history[{index}]` is no pair of texts")
        pairs.append((pair[0], pair[1]))
    asked = [record.text("instruction", may_be_empty=True)]
    if record.fields.get("input"):
        asked.append(record.text("input"))
    pairs.append(("\n".join(asked), record.text("output")))
    opening = record.text("system") if record.fields.get("system") else ""
    return opening, pairs


def _contexts(
    inputs: Sequence[Path], conversion: Conversion, form: str, said: Callable[[Record], Said]
) -> Iterator[Context | None]:
    count = conversion.counter.count
    for path in inputs:
        for record in read_records(path, form):
            opening, pairs = said(record)
            rounds = tuple(Round(count(question), count(answer)) for question, answer in pairs)
            yield Context(count(opening), rounds) if rounds else None


def _converted(
    inputs: Sequence[Path],
    conversion: Conversion,
    form: str,
    said: Callable[[Record], Said],
    think_s: float,
    *,
    by_session: bool,
) -> Converted:
    contexts: list[Context] = []
    empty = 0
    for context in _contexts(inputs, conversion, form, said):
        if context is None:
            empty += 1
            continue
        contexts.append(context)
        if len(contexts) == conversion.most_contexts:
            break
    if not contexts:
        names = ", ".join(map(str, inputs))
        raise ConfigError(
            f"{names}: no conversation with an answered question was found; give files that hold some"
        )
    requests = conversation_requests(contexts, conversion.order, conversion.seed, think_s)
    requests = requests[: conversion.most_requests]
    notes = [
        f"{think_s:g} s between an answer and the next question (--think-time)",
        "the simulator's rate is of " + ("conversations" if by_session else "rounds"),
        f"order: {conversion.order}, seed {conversion.seed}; a conversation's rounds stay in their order",
    ]
    if empty:
        notes.append(f"{empty} conversations without an answered question were left out")
    workload = {"kind": "explicit", "rate_of_sessions": by_session, "requests": requests}
    return Converted(workload, statistics_of(contexts, requests), tuple(notes))
