"""Documents and questions that arrive by themselves at a server, from a host that holds every document, beside the same
arrivals with nothing cached.

`python -m strata.bench serve` is the full measurement.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from strata.bench import serve_command
from strata.bench.http_target import ServerProcess, server_arguments
from strata.bench.report import median
from strata.config import StrataConfig

FLAGS = ["--documents", "4", "--tokens", "500", "--requests", "8", "--rates", "1", "--max-tokens", "8"]
SEEDS = (1, 2)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server of the default model with all three tiers."""
    config = StrataConfig.of(
        disk_path=tmp_path / "kv", device_memory="256MiB", host_memory="256MiB", disk_capacity="1GiB"
    )
    process = ServerProcess(server_arguments(config))
    yield process
    process.stop()


@pytest.mark.benchmark(group="serve")
def test_documents_under_load(benchmark: Any, server: ServerProcess, tmp_path: Path) -> None:
    """The benchmark's time is that of both sides together; the ratios are in `extra_info`."""

    def figures(seed: int, *more: str) -> dict[str, float]:
        target = tmp_path / "result.json"
        arguments = [*FLAGS, "--url", server.url, "--seeds", str(seed), "--json", str(target), *more]
        assert serve_command.main(arguments) == 0
        found: dict[str, float] = json.loads(target.read_text(encoding="utf-8"))["runs"][0]["figures"]
        return found

    def measure() -> list[tuple[dict[str, float], dict[str, float]]]:
        return [(figures(seed), figures(seed, "--warm", "host")) for seed in SEEDS]

    pairs = benchmark.pedantic(measure, rounds=1)
    assert all(warm["tokens_host"] > 0 for _, warm in pairs)
    for name in ("ttft_s_p50", "ttft_s_p90", "output_tokens_per_s"):
        benchmark.extra_info[f"warm_over_cold_{name}"] = median(
            [warm[name] / cold[name] for cold, warm in pairs]
        )
