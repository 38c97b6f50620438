"""`examples/ask_document.py` against a server: it streams the answer and says where the tokens came from."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from running_server import RunningServer
from server_process import Run

EXAMPLE = Path(__file__).parents[2] / "examples" / "ask_document.py"


def ask(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLE), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("path", ["", "/v1/"])
def test_an_answer_is_streamed_with_its_sources(path: str, tmp_path: Path) -> None:
    document = tmp_path / "document.txt"
    document.write_text("A page holds the keys and values of sixteen tokens.", encoding="utf-8")
    server = RunningServer()
    try:
        done = ask(str(document), "What is a page?", "--url", server.url + path, "--max-tokens", "8")
    finally:
        server.stop()
    assert done.returncode == 0, done.stderr
    assert done.stderr == "reading 51 characters ...\n"
    answer, sources, first = done.stdout.rsplit("\n", 3)[:3]
    assert answer.strip()
    assert "prompt tokens: " in sources and " from host memory, " in sources
    assert first.startswith("First token after ")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"text", "no server answers at http://127.0.0.1:9: start one with `make serve`, or name another"),
        (None, "document.txt cannot be read: No such file or directory"),
        (b"%PDF-1.7 \xe2\xe3", "document.txt is no UTF-8 text (byte 9): export or convert it to plain text"),
    ],
)
def test_what_goes_wrong_is_said_in_a_sentence(content: bytes | None, said: str, tmp_path: Path) -> None:
    document = tmp_path / "document.txt"
    if content is not None:
        document.write_bytes(content)
    done = ask(str(document), "What?", "--url", "http://127.0.0.1:9")
    assert done.returncode == 1
    assert said in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL"])
def test_a_server_that_stops_amid_an_answer_is_named(how: str, run: Run, tmp_path: Path) -> None:
    document = tmp_path / "document.txt"
    document.write_text("text", encoding="utf-8")
    server = run("--drain-timeout-s", "0", FAKE_PIECES="2", FAKE_HOLD="1")
    command = [sys.executable, str(EXAMPLE), str(document), "What?", "--url", server.url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as asking:
        assert asking.stdout is not None and asking.stderr is not None
        assert asking.stdout.read(2) == "aa"
        server.process.send_signal(signal.Signals[how])
        said = asking.stderr.read()
        assert asking.wait(60) == 1
    assert "the answer broke off: " in said and "Traceback" not in said


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
    assert done.returncode == 1 and done.stderr == "reading 4 characters ...\n"
