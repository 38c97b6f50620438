"""A server is replaced by another on the same disk root while clients ask: nobody is refused or cut, and what the old
one computed comes from the disk of the new one.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from tiny_folder import make_folder
from tiny_server import wait_for

WORDS = "What was computed once is not computed again, so a document comes back sooner the second time. " * 12
SECRET = "xyzzy-plugh"
LEAVE_S = "1.5"


class RollingServer:
    """A server program over the tiny model, all of them on one disk root."""

    def __init__(self, root: Path, name: str) -> None:
        self.log = root / f"{name}.log"
        flags = [
            "--model",
            str(root / "model"),
            "--disk-path",
            str(root / "kv"),
            "--port",
            "0",
            "--threads",
            "1",
        ]
        flags += ["--device-memory", "32MiB", "--host-memory", "32MiB", "--disk-capacity", "256MiB"]
        flags += ["--leave-notice-s", LEAVE_S, "--prefetch-policy", "wait", "--load-policy", "always"]
        flags += ["--log-format", "json", "--log-level", "debug", "--api-key", SECRET]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "strata.serve", *flags], stdout=log, stderr=subprocess.STDOUT
            )
        self.url = ""

    def wait_ready(self) -> None:
        """Waits for the address, which the log tells, and for /ready."""
        wait_for(lambda: "is free" in self.log.read_text() or self.process.poll() is not None, 120)
        assert self.process.poll() is None, self.log.read_text()
        self.url = self.log.read_text().split("Address ")[1].split(" is free")[0]
        wait_for(lambda: self.process.poll() is not None or self.is_ready(), 120)
        assert self.is_ready(), self.log.read_text()

    def is_ready(self) -> bool:
        """What a load balancer asks; a server that is gone is not ready."""
        try:
            return httpx.get(self.url + "/ready", timeout=30).status_code == 200
        except httpx.TransportError:
            return False

    def get(self, path: str) -> Any:
        headers = {"Authorization": f"Bearer {SECRET}"}
        return httpx.get(self.url + path, headers=headers, timeout=30).raise_for_status().json()

    def lines(self) -> list[dict[str, Any]]:
        """The log, every line of which must be an object."""
        return [json.loads(line) for line in self.log.read_text().splitlines()]


def ask(server: RollingServer, prompt: str, tokens: int = 16) -> tuple[str, dict[str, Any]]:
    """A streamed answer and its usage; fails unless it comes whole."""
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True}
    headers = {"Authorization": f"Bearer {SECRET}"}
    text, usage, last = "", {}, ""
    url = server.url + "/v1/completions"
    with httpx.stream("POST", url, json=body, headers=headers, timeout=60) as answer:
        assert answer.status_code == 200, answer.read()
        for line in filter(None, answer.iter_lines()):
            last = line
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                text += "".join(choice["text"] for choice in event["choices"])
                usage = event.get("usage") or usage
    assert last == "data: [DONE]" and usage["completion_tokens"] == tokens
    return text, usage


@dataclass
class Clients:
    """Four clients that ask the first ready server of a list, again and again, and take down what goes wrong."""

    servers: list[RollingServer]
    failures: list[str] = field(default_factory=list)
    answers: dict[str, int] = field(default_factory=dict)
    ending: threading.Event = field(default_factory=threading.Event)
    threads: list[threading.Thread] = field(default_factory=list)

    def start(self) -> None:
        for number in range(4):
            self.threads.append(threading.Thread(target=self._ask_on, args=(number,)))
            self.threads[-1].start()

    def stop(self) -> None:
        self.ending.set()
        for thread in self.threads:
            thread.join(60)

    def _ask_on(self, number: int) -> None:
        round_number = 0
        while not self.ending.is_set():
            round_number += 1
            server = next((server for server in self.servers if server.is_ready()), None)
            if server is None:
                self.failures.append("no server was ready")
                return
            try:
                ask(server, f"{SECRET} client {number} asks for the {round_number}. time. {WORDS[:300]}", 40)
                self.answers[server.url] = self.answers.get(server.url, 0) + 1
            except (httpx.HTTPError, AssertionError) as error:
                self.failures.append(f"{server.url}: {error!r}")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], RollingServer]]:
    make_folder(tmp_path / "model")
    servers: list[RollingServer] = []

    def begin(name: str) -> RollingServer:
        servers.append(RollingServer(tmp_path, name))
        servers[-1].wait_ready()
        return servers[-1]

    yield begin
    for server in servers:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait(timeout=30)


def test_one_server_replaces_another_under_load(start: Callable[[str], RollingServer]) -> None:
    old = start("old")
    cold, usage = ask(old, f"{SECRET} {WORDS}")
    assert usage["strata"]["computed"] == usage["prompt_tokens"] > 200
    new = start("new")
    (problem,) = new.get("/health")["problems"]
    assert "disk tier is off" in problem and "in use by" in problem

    clients = Clients([old, new])
    clients.start()
    wait_for(lambda: clients.answers.get(old.url, 0) >= 4)
    old.process.send_signal(signal.SIGTERM)
    not_ready = 0
    while old.process.poll() is None:
        not_ready += not new.is_ready()
        time.sleep(0.02)
    assert old.process.returncode == 0, old.log.read_text()
    wait_for(lambda: new.get("/cache")["stats"]["disk_up"] == 1)
    before = clients.answers[new.url]
    wait_for(lambda: clients.answers[new.url] >= before + 4)
    clients.stop()
    assert clients.failures == [] and not_ready == 0

    wait_for(lambda: new.get("/cache")["tiers"]["disk"]["used_tokens"] > usage["prompt_tokens"])
    warm, usage = ask(new, f"{SECRET} {WORDS}")
    assert warm == cold and usage["strata"]["disk"] >= 0.9 * usage["prompt_tokens"], usage
    assert new.get("/health")["problems"] == []
    new.process.send_signal(signal.SIGTERM)
    assert new.process.wait(60) == 0

    for server in (old, new):
        lines = server.lines()
        assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)
        assert not [
            line for line in lines if line["level"] in ("warning", "error") and "disk" not in line["message"]
        ]
        # Neither what was asked nor the key is ever logged.
        assert SECRET not in server.log.read_text() and WORDS[:20] not in server.log.read_text()
    answered = [line for line in old.lines() if "prompt_tokens" in line]
    assert len(answered) == clients.answers[old.url] + 1
