"""The server as a user runs it: a process of its own, the default model, real HTTP, the plain `openai` client.

A long document is asked about, comes back from each tier, and survives SIGTERM and kill -9 on the same disk root.
"""

from __future__ import annotations

import itertools
import os
import pydoc_data.topics
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

START_S = 180.0
ANSWER_TOKENS = 12
Usage = dict[str, Any]


class Server:
    """One `python -m strata.serve` on a free port."""

    def __init__(self, root: Path, *flags: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = root / f"server-{port}.log"
        command = [sys.executable, "-m", "strata.serve", "--port", str(port), *flags]
        command += ["--disk-path", str(root / "kv"), "--device-memory", "512MiB", "--host-memory", "256MiB"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + START_S
        while not self._is_up():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.1)
        self.client = OpenAI(base_url=f"{self.url}/v1", api_key="unused", timeout=120, max_retries=0)

    def _is_up(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def ask(self, prompt: str) -> tuple[str, Usage]:
        """The streamed answer and its usage, as the client sees them."""
        text, usage = "", None
        stream = self.client.completions.create(
            model="default",
            prompt=prompt,
            temperature=0,
            max_tokens=ANSWER_TOKENS,
            stream=True,
            stream_options={"include_usage": True},
        )
        for chunk in stream:
            text += "".join(choice.text for choice in chunk.choices)
            usage = chunk.usage or usage
        assert usage is not None
        return text, usage.model_dump()

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=60).raise_for_status()

    def stats(self) -> dict[str, float]:
        stats: dict[str, float] = httpx.get(f"{self.url}/cache", timeout=10).json()["stats"]
        return stats

    def wait_for(self, done: Callable[[dict[str, float]], bool]) -> dict[str, float]:
        deadline = time.monotonic() + 30
        while not done(stats := self.stats()):
            assert time.monotonic() < deadline, stats
            time.sleep(0.05)
        return stats

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=60)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def begin(*flags: str) -> Server:
        servers.append(Server(tmp_path, *flags))
        return servers[-1]

    yield begin
    for server in servers:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait(timeout=30)


@pytest.fixture(scope="module")
def document() -> str:
    topics = pydoc_data.topics.topics
    return "\n".join(topics[name] for name in sorted(topics))[:4000]


def cached(usage: Usage) -> float:
    return float(usage["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"])


def test_a_document_comes_back_from_every_tier_and_after_every_end(
    start: Callable[..., Server], document: str
) -> None:
    server = start()
    prompt = f"{document}\n\nQuestion: what is this about?\nAnswer:"
    cold, usage = server.ask(prompt)
    assert usage["prompt_tokens"] > 800
    assert usage["strata"]["computed"] == usage["prompt_tokens"]
    for tiers, source in ([], "device"), (["device"], "host"), (["device", "host"], "disk"):
        server.wait_for(lambda stats: stats["transfers_in_flight"] == 0 and stats["running"] == 0)
        if tiers:
            server.post("/cache/demote", tiers=tiers)
        text, usage = server.ask(prompt)
        assert text == cold, f"the answer changed when its document came from {source}"
        assert cached(usage) >= 0.95
        assert usage["strata"][source] == usage["prompt_tokens_details"]["cached_tokens"]
    assert server.end(signal.SIGTERM) == 0, server.log.read_text()

    server = start()
    text, usage = server.ask(prompt)
    assert (text, cached(usage) >= 0.95) == (cold, True)
    assert usage["strata"]["disk"] > 0
    fresh, _ = server.ask(f"A second document. {document[:1500]}")
    server.wait_for(lambda stats: stats["transfers_in_flight"] == 0)
    server.end(signal.SIGKILL)

    server = start()
    for wanted, text in (cold, prompt), (fresh, f"A second document. {document[:1500]}"):
        answer, usage = server.ask(text)
        assert (answer, cached(usage) >= 0.95) == (wanted, True)
    assert "disk" in server.log.read_text()
    server.post("/cache/flush")
    stats = server.stats()
    assert [stats[f"{tier}_resident_pages"] for tier in ("device", "host", "disk")] == [0, 0, 0]
    _, usage = server.ask(prompt)
    assert cached(usage) == 0


def test_a_client_that_leaves_and_a_chat_that_goes_on(start: Callable[..., Server], document: str) -> None:
    server = start("--disk-capacity", "0")
    body = {"model": "default", "prompt": document, "max_tokens": 400, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
        next(response.iter_lines())
    stats = server.wait_for(lambda stats: stats["running"] == 0 and stats["transfers_in_flight"] == 0)
    assert stats["aborted"] == 1
    assert [stats[f"{tier}_pinned_pages"] for tier in ("device", "host")] == [0, 0]

    messages: list[Any] = [{"role": "user", "content": f"Summarise in one sentence:\n{document[:1500]}"}]
    reused: list[tuple[int, int]] = []
    for turn in range(3):
        answer = server.client.chat.completions.create(
            model="default", messages=messages, temperature=0, max_tokens=32
        )
        usage = answer.model_dump()["usage"]
        reused.append((usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]))
        messages += [
            {"role": "assistant", "content": answer.choices[0].message.content},
            {"role": "user", "content": f"And once more, shorter, in version {turn}."},
        ]
    for (_, former), (hit, _) in itertools.pairwise(reused):
        # All of the former prompt comes back, but for the page that the new turn makes whole.
        assert hit >= former - 16, reused
    with pytest.raises(httpx.HTTPStatusError):
        server.post("/cache/demote", tiers=["host"])


def test_the_second_server_on_one_root_serves_without_its_disk(
    start: Callable[..., Server], document: str
) -> None:
    first, second = start(), start()
    assert "in use by" in second.log.read_text()
    problems = httpx.get(f"{second.url}/health", timeout=10).text
    assert "disk tier is off" in problems
    assert first.ask(document[:600])[0] == second.ask(document[:600])[0]
    assert os.path.isdir(first.log.parent / "kv")
