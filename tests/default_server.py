"""A server of the default model, started as a user starts it, on a free port."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

START_S = 180.0


@contextmanager
def default_server(root: Path) -> Iterator[str]:
    """Where it serves; `root` takes its disk tier and its log. Ends with SIGTERM and must exit 0: no client may leave
    anything behind."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = root / "server.log"
    process = _start(port, root, log)
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_S
        while not _answers(address):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield address
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()
    finally:
        process.kill()
        process.wait(30)


def _start(port: int, root: Path, log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "strata.serve", "--port", str(port), "--disk-path", str(root / "kv")]
    command += ["--device-memory", "512MiB", "--host-memory", "256MiB"]
    with log.open("wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)


def _answers(address: str) -> bool:
    try:
        return httpx.get(f"{address}/ready", timeout=5).status_code == 200
    except httpx.TransportError:
        return False
