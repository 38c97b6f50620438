"""What README and docs show works: every Python snippet runs, every command of ours is there with its flags.

Snippets of a document are read from its top, so that one may use the names of those before it. What a comment beside
a `print` promises must be printed. A server that they talk to is one of the default model.
"""

from __future__ import annotations

import importlib
import io
import re
import tempfile
from collections import defaultdict
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from snippets import ROOT, Snippet, commands, documents, fences, python_snippets

ADDRESS = "http://127.0.0.1:8000"
LANGUAGES = {"", "json", "python", "text", "yaml"}
FLAG = re.compile(r"^(--[a-z][a-z0-9-]*)(?:=.*)?$", re.S)
PROMISE = re.compile(r"^ *print\(.*\)  # (.+)$", re.M)
SNIPPETS = python_snippets()


@pytest.fixture(scope="module")
def read() -> dict[str, tuple[set[Snippet], dict[str, Any]]]:
    """By document: the snippets that ran, and the names that they left."""
    return defaultdict(lambda: (set(), {"__name__": "snippet"}))


@pytest.mark.parametrize("snippet", SNIPPETS, ids=str)
def test_a_snippet_runs(
    snippet: Snippet,
    read: dict[str, tuple[set[Snippet], dict[str, Any]]],
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    done, names = read[snippet.document]
    for one in SNIPPETS[: SNIPPETS.index(snippet) + 1]:
        if one.document == snippet.document and one not in done:
            done.add(one)
            capsys.readouterr()
            _run(one, names, request)
    printed = capsys.readouterr().out.splitlines()
    for promise in PROMISE.findall(snippet.text):
        assert promise in printed


def test_every_block_says_what_it_is() -> None:
    """A Python snippet under another name would run nowhere."""
    blocks = [block for document in documents() for block in fences(document)]
    assert {language for language, _ in blocks} <= LANGUAGES
    assert not [str(snippet) for language, snippet in blocks if not language and "import " in snippet.text]


@pytest.mark.parametrize("document", documents(), ids=lambda path: path.name)
def test_commands_and_their_flags_are_there(document: Path) -> None:
    for line, words in commands(document):
        program, *rest = words
        where = f"{line}: {line.text}"
        if program == "make":
            _check_make(rest, where)
        elif program == "strata":
            _check_flags("strata.cli.main", rest, where)
        elif rest[0] == "-m" and rest[1].startswith("strata"):
            _check_flags(rest[1], rest[2:], where)
        elif rest[0].endswith(".py") and not rest[0].startswith("/"):
            script = (ROOT / rest[0]).read_text(encoding="utf-8")
            assert [flag for flag in _flags(rest[1:]) if f'"{flag}"' not in script] == [], where


@pytest.mark.parametrize("document", documents(), ids=lambda path: path.name)
def test_links_to_files_lead_somewhere(document: Path) -> None:
    targets = re.findall(r"\]\((?!https?://|#)([^)\s#]+)", document.read_text(encoding="utf-8"))
    assert [target for target in targets if not (document.parent / target).exists()] == []


def test_the_site_has_every_guide() -> None:
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert [path.name for path in ROOT.glob("docs/*.md") if f": {path.name}\n" not in site] == []


def test_the_readme_s_table_names_flags_of_the_server() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`--.*?) \|", text, re.M)
    flags = [flag for row in rows for flag in re.findall(r"`(--[a-z-]+)`", row)]
    assert len(flags) > 10
    assert [flag for flag in flags if flag not in _known("strata.serve", ())] == []


def _run(snippet: Snippet, names: dict[str, Any], request: pytest.FixtureRequest) -> None:
    """Line numbers of a traceback are those of the document."""
    source = "\n" * (snippet.line - 1) + snippet.text
    if ADDRESS in source:
        source = source.replace(ADDRESS, request.getfixturevalue("default_server_url"))
    exec(compile(source, str(ROOT / snippet.document), "exec"), names)


def _check_make(words: list[str], where: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for word in words:
        name, equals, value = word.partition("=")
        kind = rf"^{re.escape(name)} \?=" if equals else rf"^{re.escape(name)}:"
        assert re.search(kind, makefile, re.M), where
        if name == "ARGS" and "serve" in words:
            _check_flags("strata.serve", value.split(), where)


def _check_flags(module: str, words: list[str], where: str) -> None:
    positional = []
    for word in words:
        if word.startswith("-"):
            break
        positional.append(word)
    if "--figure" in words:
        positional += ["--figure", "9"]  # it has flags of its own
    missing = [flag for flag in _flags(words) if flag not in _known(module, tuple(positional))]
    assert missing == [], where


def _flags(words: list[str]) -> list[str]:
    return [match[1] for word in words if (match := FLAG.match(word))]


@cache
def _known(module: str, words: tuple[str, ...]) -> frozenset[str]:
    """The flags that `--help` of a command shows, with the server's where it takes those too."""
    package = importlib.import_module(module)
    program = package if hasattr(package, "main") else importlib.import_module(f"{module}.__main__")
    output = io.StringIO()
    with redirect_stdout(output):
        try:
            code = program.main([*words, "--help"])
        except SystemExit as end:
            code = end.code
    assert not code, f"{module} {' '.join(words)} --help ended with {code}"
    text = output.getvalue()
    known = frozenset(re.findall(r"--[a-z][a-z0-9-]*", text)) | {"--help"}
    takes_more = "flag of `strata serve`" in " ".join(text.split())
    return known | _known("strata.serve", ()) if takes_more else known
