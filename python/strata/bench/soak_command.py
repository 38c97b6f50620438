"""`bench soak-http`: many clients, some of which leave, and what the server is like after them."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from strata.bench.http_target import ServerProcess, server_arguments
from strata.bench.load.client import COMPLETIONS, OpenAIClient, make_http
from strata.bench.load.schedule import sample_words
from strata.bench.load.server import StrataAdmin, characters_per_token, look_at
from strata.bench.report import JSON_HELP, Bound, bounds_table, check_json_path, emit, table_of
from strata.bench.settings import ENGINE_FLAGS_HELP, bench_config, check_least, manifest, settings_of
from strata.bench.soak import Look, Plan, Tally, growth, soak

_TIMEOUT_S = 600.0
_GROWTH_SHARE = 0.05
"""The part of the server's memory by which it may have grown in the second half: allocators round."""
_LOOKS = 200
_SAMPLE_CHARACTERS = 500
_SMALL_TIERS = ("--device-memory", "256MiB", "--host-memory", "128MiB", "--disk-capacity", "512MiB")
"""So that all of them are full, and what the server takes stays as it is, long before the end."""
Result = dict[str, Any]


def main(arguments: Sequence[str], program: str = "python -m strata.bench soak-http") -> int:
    """Runs and reports. Returns 0, or 1 if a bound does not hold; raises StrataError."""
    options, rest = _parser(program).parse_known_args(arguments)
    check_least(options, (("clients", 1), ("seconds", 1), ("documents", 1), ("max_tokens", 1), ("tokens", 1)))
    check_json_path(options.json)
    chosen = [] if options.model is None else ["--model", options.model]
    with bench_config([*_SMALL_TIERS, *rest, *chosen], program) as config:
        facts = manifest(program, options.seed, flags=vars(options), settings=settings_of(config))
        server = ServerProcess([*server_arguments(config), "--log-level", "warning"])
        try:
            result = asyncio.run(_run(server, options))
        finally:
            server.stop()
    bounds = _bounds_of(result)
    result |= {"bounds": [bound.as_json() for bound in bounds], "manifest": facts}
    emit(result, [_table(result), bounds_table(bounds)], options.json)
    return 0 if all(bound.holds for bound in bounds) else 1


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program,
        allow_abbrev=False,
        description="Many clients, some of which leave within their answer; then the server must be as it was.",
        epilog=ENGINE_FLAGS_HELP,
    )
    parser.add_argument("--clients", type=int, default=200, help="at once (default: 200)")
    parser.add_argument("--seconds", type=float, default=600.0, help="(default: 600)")
    parser.add_argument("--leave", type=float, default=0.2, help="part whose client leaves (default: 0.2)")
    parser.add_argument("--documents", type=int, default=16, help="that are asked about (default: 16)")
    parser.add_argument("--tokens", type=int, default=400, help="of a document, about (default: 400)")
    parser.add_argument("--max-tokens", type=int, default=24, help="longest answer (default: 24)")
    parser.add_argument("--seed", type=int, default=1, help="of what is asked (default: 1)")
    parser.add_argument("--model", help="what the server loads")
    parser.add_argument("--json", metavar="FILE", help=JSON_HELP)
    return parser


async def _run(server: ServerProcess, options: argparse.Namespace) -> Result:
    async with make_http(server.url, _TIMEOUT_S) as http:
        admin = StrataAdmin(http)
        facts = await look_at(http, None)
        async with OpenAIClient(server.url, facts.model, _TIMEOUT_S, ignore_eos=True) as client:
            length = await characters_per_token(client, COMPLETIONS, sample_words(_SAMPLE_CHARACTERS))
        plan = Plan(
            options.clients,
            options.seconds,
            options.leave,
            options.documents,
            round(options.tokens * length),
            options.max_tokens,
            options.seed,
        )
        looks: list[Look] = []
        watching = asyncio.ensure_future(_watch(server.pid, looks, options.seconds / _LOOKS))
        try:
            tally = await soak(http, plan)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
    # Its connections are closed: what the server holds now, it holds for nobody.
    async with make_http(server.url, _TIMEOUT_S) as http:
        admin = StrataAdmin(http)
        await admin.settle()
        stats = await admin.stats()
        last = _look(server.pid)
    return {**_told(tally), "stats": stats, "looks": [asdict(look) for look in looks], "last": asdict(last)}


def _told(tally: Tally) -> Result:
    return {
        "outcomes": dict(tally.outcomes),
        "failures": dict(tally.failures.most_common(20)),
        "failed": tally.failures.total(),
        "prompt_tokens": tally.prompt_tokens,
        "cached_tokens": tally.cached_tokens,
    }


async def _watch(pid: int, looks: list[Look], every_s: float) -> None:
    while True:
        looks.append(_look(pid))
        await asyncio.sleep(every_s)


def _look(pid: int) -> Look:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return Look(
        time.monotonic(),
        int(fields["VmRSS"].split()[0]) << 10,
        _sockets(pid),
        int(fields["Threads"]),
    )


def _sockets(pid: int) -> int:
    """Sockets that a process has open; the disk tier's files come and go."""
    count = 0
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed while it was looked at
            count += os.readlink(entry).startswith("socket:")
    return count


def _bounds_of(result: Result) -> list[Bound]:
    stats, looks = result["stats"], [Look(**look) for look in result["looks"]]
    pinned = sum(stats[f"{tier}_pinned_pages"] for tier in ("device", "host", "disk"))
    busy = sum(stats[name] for name in ("running", "waiting", "transfers_in_flight"))
    connections = result["last"]["open_sockets"] - looks[0].open_sockets
    threads = result["last"]["threads"] - max(look.threads for look in looks)
    most_growth = _GROWTH_SHARE * looks[-1].resident_bytes / (1 << 20)
    return [
        Bound("requests that failed", result["failed"], 0, "", "none"),
        Bound("pinned afterwards", pinned, 0, "pages", "none"),
        Bound("running, waiting or moving afterwards", busy, 0, "", "none"),
        Bound(
            "memory gained in the second half",
            growth(looks) / (1 << 20),
            most_growth,
            "MiB",
            "5% of the whole",
        ),
        Bound("connections afterwards, more than before", connections, 0, "", "none"),
        Bound("threads more than under load", threads, 0, "", "none"),
    ]


def _table(result: Result) -> Any:
    looks = [Look(**look) for look in result["looks"]]
    rows = [(f"requests: {name}", f"{count:,}") for name, count in sorted(result["outcomes"].items())]
    rows += [(f"failed: {words}", f"{count:,}") for words, count in result["failures"].items()]
    rows.append(
        ("prompt tokens from the cache", f"{result['cached_tokens'] / max(1, result['prompt_tokens']):.0%}")
    )
    for name, look in (("first", looks[0]), ("middle", looks[len(looks) // 2]), ("last", looks[-1])):
        rows.append((f"resident memory, {name}", f"{look.resident_bytes / (1 << 20):,.0f} MiB"))
    rows.append(("most threads", f"{max(look.threads for look in looks)}"))
    return table_of("what became of the requests", ("what", "number"), rows)
