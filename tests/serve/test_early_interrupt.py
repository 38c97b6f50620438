"""Ctrl-C before there is a server to stop: the program ends at once, and prints no traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from server_process import PACKAGE


@pytest.mark.parametrize("program", [("strata.serve",), ("strata.cli.main", "serve")], ids=lambda it: it[0])
def test_an_interrupt_while_the_program_is_imported_prints_no_traceback(program: tuple[str, ...]) -> None:
    # Each import is told as it ends, so that the signal comes amid them however slow the machine is.
    command = [sys.executable, "-X", "importtime", "-m", *program, "--port", "0"]
    paths = os.pathsep.join([str(PACKAGE), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths}
    said: list[str] = []
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            said.append(line)
            if line.rstrip().endswith(" strata.errors"):
                process.send_signal(signal.SIGINT)
        code = process.wait(30)
    assert code in (-signal.SIGINT, 128 + signal.SIGINT), "".join(said[-30:])
    assert "Traceback" not in "".join(said) and "KeyboardInterrupt" not in "".join(said)
