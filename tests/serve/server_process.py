"""The server program around a fake engine, in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from running_server import wait_until

HERE = Path(__file__).parent
PACKAGE = HERE.parents[1] / "python"


class ServerProcess:
    """A server program that runs; `output` is what it has printed so far."""

    def __init__(self, flags: tuple[str, ...], environment: dict[str, str], home: Path) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("STRATA_", "OMP_"))}
        paths = os.pathsep.join([str(PACKAGE), kept.pop("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "fake_server_process.py"), "--port", "0", *flags],
            env={**kept, "XDG_CACHE_HOME": str(home), "PYTHONPATH": paths, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    @property
    def output(self) -> str:
        return "".join(self.lines)

    @property
    def url(self) -> str:
        """Waits for the server to be ready."""
        wait_until(lambda: "serving" in self.output or self.process.poll() is not None, 30)
        found = re.search(r"serving +(\S+)", self.output)
        assert found, self.output
        return found[1]

    def exit_code(self, timeout_s: float = 30.0) -> int:
        """Waits for the end; afterwards the output is complete."""
        code = self.process.wait(timeout_s)
        self._reader.join(10)
        return code

    def close(self) -> None:
        self.process.kill()
        self.exit_code()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            self.lines.extend(lines)


Run = Callable[..., ServerProcess]
"""Starts a server with flags and environment variables."""
