"""What the documents show: their Python snippets, and the commands of this repository in blocks and in sentences."""

from __future__ import annotations

import re
import shlex
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FENCE = re.compile(
    r"^[ \t]*(?:\d+\. |- )?```(?P<language>[\w+-]*)\n(?P<body>.*?)^[ \t]*```[ \t]*$", re.M | re.S
)
INLINE = re.compile(r"`([^`]+)`")
PROGRAMS = ("python", "python3", "strata", "make")


@dataclass(frozen=True)
class Snippet:
    """Part of a document, from line `line` on."""

    document: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.document}:{self.line}"


def documents() -> list[Path]:
    """Those for users, and those for who works on the project."""
    return sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


def fences(document: Path) -> list[tuple[str, Snippet]]:
    """Fenced blocks with their languages."""
    text, name = document.read_text(encoding="utf-8"), str(document.relative_to(ROOT))
    return [
        (
            match["language"],
            Snippet(name, text[: match.start("body")].count("\n") + 1, textwrap.dedent(match["body"])),
        )
        for match in FENCE.finditer(text)
    ]


def python_snippets() -> list[Snippet]:
    """In the order of their documents."""
    return [
        snippet for document in documents() for language, snippet in fences(document) if language == "python"
    ]


def commands(document: Path) -> list[tuple[Snippet, list[str]]]:
    """Command lines that start this project's programs, as words."""
    lines = [
        Snippet(snippet.document, snippet.line, line)
        for language, snippet in fences(document)
        if not language
        for line in snippet.text.replace("\\\n", " ").splitlines()
    ]
    text, name = document.read_text(encoding="utf-8"), str(document.relative_to(ROOT))
    prose = FENCE.sub(lambda block: "\n" * block[0].count("\n"), text)
    lines += [
        Snippet(name, prose[: span.start()].count("\n") + 1, span[1].replace("\n", " "))
        for span in INLINE.finditer(prose)
    ]
    split = [(line, _words(line.text)) for line in lines]
    return [(line, words) for line, words in split if len(words) > 1 and words[0] in PROGRAMS]


def _words(line: str) -> list[str]:
    try:
        words = shlex.split(line.removeprefix("$ "), comments=True)
    except ValueError:  # an apostrophe: what a program printed, or prose
        return []
    if words:
        words[0] = words[0].removeprefix(".venv/bin/")
    return words
