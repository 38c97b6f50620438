"""The examples run as a reader would run them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str, *arguments: str) -> str:
    """What an example prints. It must end by itself, and well."""
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_foreign_engine() -> None:
    lines = run("foreign_engine.py").splitlines()
    assert [line.split("; ")[0] for line in lines[:4]] == [
        "found 0 on the device, 0 in host memory, 0 on disk",
        "found 96 on the device, 0 in host memory, 0 on disk",
        "found 0 on the device, 96 in host memory, 0 on disk",
        "found 0 on the device, 0 in host memory, 96 on disk",
    ]
    assert lines[4] == "the same answer each time"


def test_library_engine() -> None:
    printed = run("library_engine.py")
    first, second = (line for line in printed.splitlines() if "prompt tokens" in line)
    for question in ("What is a page?", "What is a value?"):
        assert printed.split(question)[1].splitlines()[0].strip(), "an answer has words"
    assert first.endswith(" 0 of them reused")
    assert int(second.split()[-4]) > 100
