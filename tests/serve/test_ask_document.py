"""`examples/ask_document.py` against a server: it streams the answer and says where the tokens came from."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from running_server import RunningServer

EXAMPLE = Path(__file__).parents[2] / "examples" / "ask_document.py"


def ask(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLE), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_an_answer_is_streamed_with_its_sources(tmp_path: Path) -> None:
    document = tmp_path / "document.txt"
    document.write_text("A page holds the keys and values of sixteen tokens.", encoding="utf-8")
    server = RunningServer()
    try:
        done = ask(str(document), "What is a page?", "--url", f"{server.url}/v1", "--max-tokens", "8")
    finally:
        server.stop()
    assert done.returncode == 0, done.stderr
    answer, sources, first = done.stdout.rsplit("\n", 3)[:3]
    assert answer.strip()
    assert "prompt tokens: " in sources and " from host memory, " in sources
    assert first.startswith("First token after ")


@pytest.mark.parametrize("there", [True, False])
def test_what_goes_wrong_is_said_in_a_sentence(there: bool, tmp_path: Path) -> None:
    document = tmp_path / "document.txt"
    if there:
        document.write_text("text", encoding="utf-8")
    done = ask(str(document), "What?", "--url", "http://127.0.0.1:9/v1")
    assert done.returncode == 1
    assert ("no server answers at" if there else "cannot be read") in done.stderr
    assert "Traceback" not in done.stderr


def test_a_reader_that_has_gone_is_no_fault_of_the_document(tmp_path: Path) -> None:
    document = tmp_path / "document.txt"
    document.write_text("text", encoding="utf-8")
    reads, writes = os.pipe()
    os.close(reads)
    server = RunningServer()
    try:
        command = [sys.executable, str(EXAMPLE), str(document), "What?", "--url", f"{server.url}/v1"]
        done = subprocess.run(
            command, stdout=writes, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    finally:
        server.stop()
        os.close(writes)
    assert done.returncode == 1 and done.stderr == ""
