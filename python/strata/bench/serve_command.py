"""`bench serve`: loads a server at every rate with every seed, and tells what its clients saw.

Every run starts from the same state where the server can be put into it, and a request that failed is part of the
report and of the exit code.
"""

from __future__ import annotations

import argparse
import asyncio
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.table import Table

from strata.bench.http_target import ServerProcess, server_arguments
from strata.bench.load.cache_distance import measured_distances
from strata.bench.load.client import OpenAIClient, make_http
from strata.bench.load.measures import PERCENTILES, across_seeds, failures_of, figures_of, record_as_json
from strata.bench.load.plot import draw as draw_plot
from strata.bench.load.plot import label_of
from strata.bench.load.runner import Run, Runner
from strata.bench.load.schedule import Draw, Session, Workload
from strata.bench.load.server import (
    ServerFacts,
    StrataAdmin,
    characters_per_token,
    check_warm,
    difference,
    look_at,
    warm,
)
from strata.bench.load.trace import TraceWorkload
from strata.bench.report import Steps, emit, progress_steps, table_of
from strata.bench.serve_flags import Source, check, draws_of, endpoint_of, parser_of
from strata.bench.settings import bench_config, manifest, settings_of
from strata.errors import ConfigError, StrataError

Result = dict[str, Any]
_CREDENTIALS = re.compile(r"://[^/@]*@")


def main(arguments: Sequence[str], program: str = "python -m strata.bench serve") -> int:
    """Measures and reports. Returns 0, or 1 if a request failed; raises StrataError."""
    options, rest = parser_of(program).parse_known_args(arguments)
    check(options)
    draws = draws_of(options)
    source = Source(options)
    with serving(options, rest, program) as (url, settings):
        result = asyncio.run(measure(options, draws, source, url))
        result["manifest"] = manifest(
            program, draws[0].seed if len(draws) == 1 else None, **result["manifest"], settings=settings
        )
        emit(result, tables_of(result), options.json)
        if options.plot is not None:
            draw_plot(result, options.plot)
    return 1 if result["failures"] else 0


@contextmanager
def serving(
    options: argparse.Namespace, rest: Sequence[str], program: str
) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """The server's address, and its settings if it is one of our own, which is stopped in any case."""
    if options.url is not None:
        if rest:
            raise ConfigError(
                f"{' '.join(rest)}: with --url the server has its own flags; start it with them, or leave --url out"
            )
        yield options.url.rstrip("/").removesuffix("/v1"), None
        return
    chosen = [] if options.model is None else ["--model", options.model]
    with bench_config([*rest, *chosen], program) as config:
        process = ServerProcess(server_arguments(config))
        try:
            yield process.url, settings_of(config)
        finally:
            process.stop()


async def measure(options: argparse.Namespace, draws: Sequence[Draw], source: Source, url: str) -> Result:
    """All runs, and what the manifest says of them."""
    endpoint = endpoint_of(options)
    async with make_http(url, options.request_timeout_s) as http:
        # With our own server `--model` is what it loads, and it has one name for that.
        facts = await look_at(http, options.model if options.url else None)
    check_warm(options.warm, facts)
    async with OpenAIClient(url, facts.model, options.request_timeout_s, not options.stop_at_eos) as client:
        length = options.characters_per_token or await characters_per_token(
            client, endpoint, source.samples(facts)
        )
        workload = source.workload(facts, length)
        drawn = [(draw, workload.sessions(draw)) for draw in draws]
        bench = LoadBench(options, client, endpoint, facts, workload)
        with progress_steps(
            sum(len(session.turns) for _, sessions in drawn for session in sessions)
        ) as steps:
            runs, broken = await run_all(bench, drawn, steps)
    return {
        "workload": options.workload,
        "rates": _by_rate(draws, runs),
        "runs": [result for result, _ in runs],
        "failures": failures_of([run for _, run in runs]) + broken,
        "manifest": {
            "flags": {name: _shown(value) for name, value in vars(options).items()},
            "seeds": list(dict.fromkeys(draw.seed for draw in draws)),
            "server": facts.as_json(),
            "own_server": options.url is None,
            "endpoint": endpoint,
            "characters_per_token": length,
            "state_before_each_run": _state_of(options, facts),
        },
    }


async def run_all(
    bench: LoadBench, drawn: Sequence[tuple[Draw, Sequence[Session]]], steps: Steps
) -> tuple[list[tuple[Result, Run]], list[Result]]:
    """All runs, and what kept the last ones from being made: a server that dies takes no result with it. Raises
    StrataError if not even the first can be made."""
    runs: list[tuple[Result, Run]] = []
    for draw, sessions in drawn:
        try:
            runs.append(await bench.run(draw, sessions, steps))
        except StrataError as error:
            if not runs:
                raise
            missing = f"{len(drawn) - len(runs)} of {len(drawn)} runs are missing: {error}"
            return runs, [{"message": missing, "count": 1}]
    return runs, []


class LoadBench:
    """Takes one run after the other through a server."""

    def __init__(
        self,
        options: argparse.Namespace,
        client: OpenAIClient,
        endpoint: str,
        facts: ServerFacts,
        workload: Workload,
    ) -> None:
        self._options = options
        self._client = client
        self._endpoint = endpoint
        self._workload = workload
        self._admin = StrataAdmin(client.http) if facts.is_strata else None
        self._flushes = True

    async def run(self, draw: Draw, sessions: Sequence[Session], steps: Steps) -> tuple[Result, Run]:
        """One run from its own state, as JSON and as it was."""
        held = await self._prepare(draw)
        before = await self._stats()
        name = f"{label_of(draw.rate)}, seed {draw.seed}"
        runner = Runner(self._client, self._endpoint, self._options.max_in_flight, lambda: steps.next(name))
        run = await runner.run(sessions)
        if self._admin is not None:
            # What the run's pages still cause to be written is part of it.
            await self._admin.settle()
        after = await self._stats()
        result: Result = {"rate": draw.rate, "seed": draw.seed, "figures": figures_of(run)}
        result |= {"warm_tokens": held, "server_stats": difference(before, after)}
        if self._options.workload == "documents":
            distances = measured_distances([session.topic for session in sessions])
            result["cache_distance"] = (
                {"least": min(distances), "most": max(distances)} if distances else None
            )
        if isinstance(self._workload, TraceWorkload):
            result["cut_prompts"] = self._workload.capped(draw)
        result["requests"] = [record_as_json(record) for record in run.records]
        return result, run

    async def _prepare(self, draw: Draw) -> dict[str, int]:
        """Empties a Strata's cache, and warms as asked. Returns the tokens that each tier holds then."""
        if self._admin is not None and self._flushes:
            await self._admin.flush()
            self._flushes = not self._options.keep_documents
        if self._options.warm is None:
            return {}
        texts = self._workload.warm_texts(draw)
        return await warm(self._client, self._admin, self._endpoint, texts, self._options.warm)

    async def _stats(self) -> Mapping[str, float]:
        return {} if self._admin is None else await self._admin.stats()


def _by_rate(draws: Sequence[Draw], runs: Sequence[tuple[Result, Run]]) -> list[Result]:
    rates = list(dict.fromkeys(draw.rate for draw, _ in zip(draws, runs, strict=False)))
    return [
        {
            "rate": rate,
            "figures": across_seeds([result["figures"] for result, _ in runs if result["rate"] == rate]),
        }
        for rate in rates
    ]


def _shown(value: Any) -> Any:
    """A flag's value for the manifest, without what is nobody's business: where a file lies, a password in a URL."""
    if isinstance(value, str) and "://" in value:
        return _CREDENTIALS.sub("://", value)
    return value.name if isinstance(value, Path) else value


def _state_of(options: argparse.Namespace, facts: ServerFacts) -> str:
    if not facts.is_strata:
        state = "not flushed; every run's texts are its own"
    else:
        state = "all tiers flushed" + (" before the first" if options.keep_documents else "")
    return state if options.warm is None else f"{state}, then warm: {options.warm}"


def tables_of(result: Mapping[str, Any]) -> list[Table]:
    """The result for people: a column a rate, medians over the seeds with least and most."""
    rows: list[tuple[str, str]] = [
        ("requests", "requests"),
        ("  failed", "failed"),
        ("  not sent: an earlier round failed", "unsent"),
        ("  that waited for --max-in-flight", "limited"),
        ("requests/s", "requests_per_s"),
        ("output tokens/s", "output_tokens_per_s"),
    ]
    for title, name in (
        ("TTFT from arrival", "ttft_s"),
        ("TTFT from sending", "ttft_sent_s"),
        ("token gap", "token_gap_s"),
    ):
        kinds = ["mean", *(f"p{rank}" for rank in PERCENTILES), "max"]
        rows += [(f"{title}, {kind} (s)", f"{name}_{kind}") for kind in kinds]
    found = [rate["figures"] for rate in result["rates"]]
    sources = [name for name in found[0] if name.startswith("tokens_")]
    rows += [(f"prompt tokens: {name.removeprefix('tokens_')}", name) for name in sources]
    rows.append(("latest sending by the client itself (s)", "late_s_max"))
    shown = [(title, *(_cell(figures.get(name)) for figures in found)) for title, name in rows]
    columns = ["", *(label_of(rate["rate"]) for rate in result["rates"])]
    server = result["manifest"]["server"]
    tables = [table_of(f"{server['model']}: {result['workload']}", columns, shown)]
    if result["failures"]:
        failures = [(failure["message"], str(failure["count"])) for failure in result["failures"]]
        tables.append(table_of("failures", ("message", "requests"), failures))
    return tables


def _cell(spread: Mapping[str, float] | None) -> str:
    if spread is None:
        return "-"
    if spread["least"] == spread["most"]:
        return _number(spread["median"])
    return f"{_number(spread['median'])} ({_number(spread['least'])} to {_number(spread['most'])})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
