"""`bench http-overhead`: the server's own part of an answer, at a fixed rate of 1-token answers from the cache."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.table import Table

from strata.bench.http_overhead import Timing, run
from strata.bench.http_target import ServerProcess, server_arguments
from strata.bench.report import JSON_HELP, Bound, bounds_table, check_json_path, emit, median, table_of
from strata.bench.settings import ENGINE_FLAGS_HELP, bench_config, check_least, manifest, settings_of
from strata.bench.tiny_server import MODULE

MOST_P99_MS = 10.0
"""What the HTTP side may take in the slowest of a hundred requests."""
_VOCABULARY = 97
_WARM_UP_S = 2.0
"""Of requests that do not count: the first ones of a process make what later ones find."""
_PERCENTILES = (50, 90, 99, 100)


def main(arguments: Sequence[str], program: str = "python -m strata.bench http-overhead") -> int:
    """Measures and reports. Returns 0; raises StrataError."""
    parser = argparse.ArgumentParser(
        prog=program,
        allow_abbrev=False,
        description="What the server adds to 1-token answers from the cache of a tiny model, at a fixed rate.",
        epilog=ENGINE_FLAGS_HELP,
    )
    parser.add_argument("--rate", type=float, default=200.0, help="requests a second (default: 200)")
    parser.add_argument("--seconds", type=float, default=5.0, help="of a round (default: 5)")
    parser.add_argument("--rounds", type=int, default=5, help="with each form of answer (default: 5)")
    parser.add_argument("--prompts", type=int, default=32, help="different prompts (default: 32)")
    parser.add_argument("--tokens", type=int, default=256, help="of a prompt (default: 256)")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts (default: 1)")
    parser.add_argument("--json", metavar="FILE", help=JSON_HELP)
    options, rest = parser.parse_known_args(arguments)
    check_least(options, (("rate", 1), ("seconds", 1), ("rounds", 1), ("prompts", 1), ("tokens", 2)))
    check_json_path(options.json)
    generator = np.random.default_rng(options.seed)
    prompts: list[list[int]] = generator.integers(0, _VOCABULARY, (options.prompts, options.tokens)).tolist()
    small = ["--disk-capacity", "0", "--device-memory", "64MiB", "--host-memory", "64MiB"]
    with bench_config([*small, *rest], program) as config:
        facts = manifest(program, options.seed, flags=vars(options), settings=settings_of(config))
        server = ServerProcess([*server_arguments(config), "--log-level", "warning"], MODULE)
        try:
            timings = measure(server, prompts, options)
        finally:
            server.stop()
    forms = {form: figures_of(rounds, options) for form, rounds in timings.items()}
    bounds = bounds_of(forms)
    result = {"forms": forms, "bounds": [bound.as_json() for bound in bounds], "manifest": facts}
    emit(result, [table(forms), bounds_table(bounds)], options.json)
    return 0


def measure(
    server: ServerProcess, prompts: Sequence[Sequence[int]], options: argparse.Namespace
) -> dict[str, list[Timing]]:
    """The rounds of each form of answer, taken in turn."""
    timings: dict[str, list[Timing]] = {"whole": [], "streamed": []}
    asyncio.run(run(server.url, prompts, options.rate, _WARM_UP_S, stream=True))
    for _ in range(options.rounds):
        for form, rounds in timings.items():
            one = run(server.url, prompts, options.rate, options.seconds, form == "streamed")
            rounds.append(asyncio.run(one))
    return timings


def figures_of(rounds: Sequence[Timing], options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds by part of the way and percentile: those of the median round, since what else the machine does may
    spoil one."""
    each = [_of_round(timing) for timing in rounds]
    tokens = sum(len(timing.total_s) for timing in rounds) * options.tokens
    return {
        **{name: median([figures[name] for figures in each]) for name in each[0]},
        "http_ms_p99_by_round": [figures["http_ms_p99"] for figures in each],
        "requests": sum(len(timing.total_s) for timing in rounds),
        "cached_share": 1 - sum(timing.computed_tokens for timing in rounds) / tokens,
    }


def _of_round(timing: Timing) -> dict[str, float]:
    parts = {
        "http": np.subtract(timing.total_s, timing.engine_s),
        "engine": np.array(timing.engine_s),
        "total": np.array(timing.total_s),
        "sent_late": np.array(timing.late_s),
    }
    return {
        f"{name}_ms_p{percent}": float(np.percentile(values, percent)) * 1e3
        for name, values in parts.items()
        for percent in _PERCENTILES
    }


def bounds_of(forms: dict[str, dict[str, Any]]) -> list[Bound]:
    """The promise, for each form of answer."""
    rule = f"{MOST_P99_MS:.0f} ms, in the median round"
    return [
        Bound(f"HTTP side of an answer, {form}, p99", figures["http_ms_p99"], MOST_P99_MS, "ms", rule)
        for form, figures in forms.items()
    ]


def table(forms: dict[str, dict[str, Any]]) -> Table:
    """A row for each part of the way."""
    rows = [
        (
            f"{form}: {part.replace('_', ' ')}",
            *(f"{figures[f'{part}_ms_p{each}']:.2f}" for each in _PERCENTILES),
        )
        for form, figures in forms.items()
        for part in ("http", "engine", "total", "sent_late")
    ]
    return table_of("milliseconds a request", ("part", *(f"p{each}" for each in _PERCENTILES)), rows)
