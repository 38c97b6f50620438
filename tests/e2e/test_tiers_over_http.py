"""Tiers that change while a server serves, over HTTP: resized, attached, detached; opting out; taking a root over."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from test_default_server import Server

PROMPT = "The quick brown fox jumps over the lazy dog, and then it sits down to think about caches. " * 12


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


def resident(server: Server) -> list[float]:
    stats = server.wait_for(lambda stats: stats["transfers_in_flight"] == 0 and stats["running"] == 0)
    return [stats[f"{tier}_resident_pages"] for tier in ("device", "host", "disk")]


def problems(server: Server) -> str:
    return httpx.get(f"{server.url}/health", timeout=10).text


def test_tiers_change_while_a_server_serves(start: Callable[..., Server]) -> None:
    server = start()
    body = {"model": "default", "prompt": PROMPT, "max_tokens": 4, "temperature": 0, "cache_write": False}
    cold = server.post("/v1/completions", **body).json()["choices"][0]["text"]
    assert resident(server) == [0, 0, 0], "the request asked for nothing of it to be kept"
    body["cache_write"] = True
    assert server.post("/v1/completions", **body).json()["choices"][0]["text"] == cold
    device, host, disk = resident(server)
    assert device == host == disk > 10
    assert server.post("/cache/resize", tier="host", size="64MiB").json() == {
        "bytes": pytest.approx(64 << 20, rel=0.02),
        "timed_out": 0,
    }
    server.post("/cache/resize", tier="host", size=0)
    assert resident(server)[1] == 0
    server.post("/cache/demote", tiers=["device"])
    assert server.post("/v1/completions", **body).json()["choices"][0]["text"] == cold, "through staging"
    assert server.post("/cache/disk/detach").json() == {"detached": True}
    assert resident(server)[2] == 0
    assert server.post("/cache/disk/attach").json() == {"problems": []}
    server.wait_for(lambda stats: stats["disk_resident_pages"] >= disk)
    refused = httpx.post(f"{server.url}/cache/resize", json={"tier": "moon", "size": 1}, timeout=10)
    assert refused.status_code == 400 and "moon" in refused.text
    refused = httpx.post(f"{server.url}/cache/disk/attach", json={}, timeout=10)
    assert refused.status_code >= 400 and "attached already" in refused.text
    assert server.end(signal.SIGTERM) == 0


def test_the_second_server_takes_the_root_over(start: Callable[..., Server]) -> None:
    first, second = start(), start()
    wanted, _ = first.ask(PROMPT)
    assert "disk tier is off" in problems(second) and second.stats()["disk_up"] == 0
    metrics = httpx.get(f"{second.url}/metrics", timeout=10).text
    assert "strata_disk_up 0" in metrics
    resident(first)
    assert first.end(signal.SIGTERM) == 0
    second.wait_for(lambda stats: stats["disk_up"] == 1 and stats["disk_resident_pages"] > 10)
    assert "disk tier is off" not in problems(second)
    text, usage = second.ask(PROMPT)
    assert text == wanted and usage["strata"]["disk"] > 0
