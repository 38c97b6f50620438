"""Long documents and questions about them, cut to prompts of an exact number of tokens. Every prompt of a run
has a text of its own.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics as python_topics
from typing import Any, Protocol

from strata.errors import ConfigError

_DEFAULT_TITLE = "The Python language reference"
_DEFAULT_QUESTIONS = (
    "What is the main subject of the text above?",
    "Which Python construct does the text explain first, and what is it for?",
    "Name one exception that the text mentions and say when it is raised.",
    "Summarise the last section of the text in one sentence.",
)
_LOOGLE = "LooGLE's form: a JSON object a line with `input`, `title` and `qa_pairs`"


class Encoder(Protocol):
    """What a tokenizer is asked for here; `strata.models.Tokenizer` offers it."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...


@dataclass(frozen=True)
class Document:
    """A text and what is asked about it; at least one question."""

    title: str
    text: str
    questions: tuple[str, ...]


@dataclass(frozen=True)
class Prompt:
    """`token_ids` asks the first question about a text, each of `follow_ups` another one about the same
    text.
    """

    title: str
    token_ids: list[int]
    follow_ups: tuple[list[int], ...]


def default_documents() -> list[Document]:
    """The help topics that come with Python, as one text of about 700,000 characters; Python's own
    licence.
    """
    topics: dict[str, str] = python_topics.topics
    text = "\n\n".join(f"{name}\n{topics[name]}" for name in sorted(topics))
    return [Document(_DEFAULT_TITLE, text, _DEFAULT_QUESTIONS)]


def read_documents(path: Path) -> list[Document]:
    """The documents of `--docs`. Raises ConfigError with the line that is not in LooGLE's form."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--docs {path} cannot be read: {error}; give a text file in {_LOOGLE}") from error
    documents = [_document(path, number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not documents:
        raise ConfigError(f"--docs {path} holds no document; give a file in {_LOOGLE}")
    return documents


def _document(path: Path, number: int, line: str) -> Document:
    def refuse(reason: str) -> ConfigError:
        return ConfigError(f"--docs {path}, line {number}: {reason}; each line must be in {_LOOGLE}")

    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise refuse(f"no JSON ({error})") from error
    if not isinstance(record, dict):
        raise refuse(f"a JSON {type(record).__name__}, not an object")
    text, title = record.get("input"), record.get("title", f"document {number}")
    if not isinstance(text, str) or not text.strip():
        raise refuse("`input` is not a text")
    try:
        questions = _questions(record.get("qa_pairs"))
    except ValueError as error:
        raise refuse(f"`qa_pairs` {error}") from error
    return Document(str(title), text, questions or _DEFAULT_QUESTIONS[:1])


def _questions(pairs: Any) -> tuple[str, ...]:
    """The questions of a list of pairs, or of its text as Python or JSON writes it; none for `none`."""
    if isinstance(pairs, str):
        if pairs.strip().lower() in ("", "none"):
            return ()
        pairs = parse_literal(pairs)
    if pairs is None:
        return ()
    if not isinstance(pairs, list):
        raise ValueError(f"is a {type(pairs).__name__}, not a list")
    questions = tuple(pair.get("Q") if isinstance(pair, dict) else None for pair in pairs)
    if not all(isinstance(question, str) for question in questions):
        raise ValueError("holds an entry without a question `Q`")
    return tuple(str(question) for question in questions)


def parse_literal(text: str) -> Any:
    """What JSON or Python reads in a text: data sets hold both. Raises ValueError."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError) as error:
            raise ValueError(f"is a text that neither JSON nor Python can read ({error})") from error


def make_prompts(
    documents: Sequence[Document], encoder: Encoder, tokens: int, count: int, questions: int
) -> list[Prompt]:
    """`count` prompts of exactly `tokens` tokens, each over its own piece of text and followed by
    `questions` - 1 more questions about that piece. Documents take turns. Raises ConfigError if the
    texts are too short.
    """
    start = encoder.encode("")
    texts = [encoder.encode(document.text, add_special_tokens=False) for document in documents]
    asked = [
        [
            encoder.encode(f"\n\nQuestion: {question}\nAnswer:", add_special_tokens=False)
            for question in document.questions
        ]
        for document in documents
    ]
    longest = max(len(ids) for each in asked for ids in each)
    if tokens < 2 * (longest + len(start)):
        raise ConfigError(
            f"--tokens {tokens} leaves too little room for text beside a question of {longest} tokens; "
            f"give at least {2 * (longest + len(start))}"
        )
    prompts: list[Prompt] = []
    for turn in range(count):
        for document, ids, ends in zip(documents, texts, asked, strict=True):
            piece = ids[turn * tokens : (turn + 1) * tokens]
            if len(piece) == tokens and len(prompts) < count:
                order = [ends[(turn + step) % len(ends)] for step in range(questions)]
                body = start + piece[: tokens - len(order[0]) - len(start)]
                prompts.append(
                    Prompt(document.title, body + order[0], tuple(body + end for end in order[1:]))
                )
    if len(prompts) < count:
        raise ConfigError(
            f"the texts hold {len(prompts)} pieces of --tokens {tokens}, and --pairs asks for {count}; give "
            "longer or more texts with --docs, or lower either"
        )
    return prompts
