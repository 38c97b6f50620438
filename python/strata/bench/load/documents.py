"""Long documents with questions, asked in shuffle: the workload in which a cache of prefixes matters most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from strata.bench.corpus import Document, default_documents, read_documents
from strata.bench.load.cache_distance import Distances, shuffled_order
from strata.bench.load.schedule import Draw, Session, Turn, characters_of, poisson_arrivals
from strata.errors import ConfigError

_TEXT_SUFFIXES = (".txt", ".md")
_ASKED = (
    "What is the main subject of the text above?",
    "Which two things does the text compare?",
    "Summarise the last section of the text in one sentence.",
    "Name one detail that the text mentions only once.",
)


@dataclass(frozen=True)
class DocumentsWorkload:
    """Single questions about documents; the `k`-th about a document is numbered `k`, so that none is asked twice."""

    documents: tuple[Document, ...]
    distances: Distances
    max_tokens: int
    cold: int = 0

    def sessions(self, draw: Draw) -> list[Session]:
        """One request a session; the topic is the document's number."""
        arrivals = poisson_arrivals(draw)
        order = shuffled_order(len(self.documents), len(arrivals), self.distances, draw.generator("order"))
        asked = [0] * len(self.documents)
        sessions = []
        for arrival, number in zip(arrivals, order, strict=True):
            document = self.documents[number]
            question = document.questions[asked[number] % len(document.questions)]
            asked[number] += 1
            parts = (
                self._text(draw, number),
                f"\n\nQuestion {asked[number]} of run {draw.mark}: {question}\nAnswer:",
            )
            sessions.append(Session(number, arrival, (Turn(parts, self.max_tokens),)))
        return sessions

    def warm_texts(self, draw: Draw) -> list[str]:
        """Every document, without a question."""
        return [self._text(draw, number) for number in range(len(self.documents) - self.cold)]

    def _text(self, draw: Draw, number: int) -> str:
        kept = draw.keeps_documents and number < len(self.documents) - self.cold
        run = "" if kept else f" of run {draw.mark}"
        return f"Document {number + 1}{run}\n\n{self.documents[number].text}"


def load_documents(path: Path | None) -> list[Document]:
    """The documents of `--docs`: a file in LooGLE's form, or a folder of texts and such files; None: Python's help
    topics. Raises ConfigError."""
    if path is None:
        return default_documents()
    if not path.is_dir():
        return read_documents(path)
    documents: list[Document] = []
    for file in sorted(path.rglob("*")):
        if file.suffix == ".jsonl":
            documents += read_documents(file)
        elif file.suffix in _TEXT_SUFFIXES:
            documents.append(_plain(file))
    if not documents:
        raise ConfigError(
            f"--docs {path} holds no *.jsonl, *.txt or *.md file; name a folder that does, or leave it out"
        )
    return documents


def _plain(file: Path) -> Document:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--docs: {file} cannot be read: {error}; remove it or repair it") from error
    return Document(file.stem, text, _ASKED)


def cut(
    documents: Sequence[Document], tokens: int, count: int, characters_per_token: float
) -> tuple[Document, ...]:
    """`count` pieces of about `tokens` tokens, none overlapping; documents take turns. Raises ConfigError if there is
    not that much text."""
    size = characters_of(tokens, characters_per_token)
    pieces: list[Document] = []
    for turn in range(max(len(document.text) for document in documents) // size):
        for document in documents:
            text = document.text[turn * size : (turn + 1) * size]
            if len(text) == size and len(pieces) < count:
                pieces.append(Document(document.title, text, document.questions))
    if len(pieces) < count:
        raise ConfigError(
            f"the texts hold {len(pieces)} pieces of --tokens {tokens}, and {count} are asked for; give longer or more "
            "texts with --docs, or lower --documents or --tokens"
        )
    return tuple(pieces)
