"""`bench policies`: the scheduler's policies beside each other under one load, then one policy with each of its parts
off.

Every variant is a server of its own. The variants of a stage live at once and take turns within each rate and seed, so
that whatever else the machine does falls on all of them, and each is told as a ratio to the run of the same rate and
seed that it is compared with.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strata.bench.http_target import ServerProcess, server_arguments
from strata.bench.load.client import OpenAIClient, make_http
from strata.bench.load.measures import failures_of
from strata.bench.load.runner import Run
from strata.bench.load.schedule import Draw, Session
from strata.bench.load.server import ServerFacts, characters_per_token, check_warm, look_at
from strata.bench.policies_report import Stage, Variant, bounds_of, markdown_of, stage_as_json, tables_of
from strata.bench.report import Steps, bounds_table, emit, progress_steps
from strata.bench.serve_command import LoadBench
from strata.bench.serve_flags import Source, check, draws_of, endpoint_of, parser_of
from strata.bench.settings import bench_config, manifest, settings_of
from strata.errors import ConfigError, StrataError

POLICIES = ("fcfs", "lpm", "static", "adaptive")
PARTS = ("defer", "followers", "balance", "bundles", "bubbles", "early-loads", "worth", "passing")
EMULATION = (
    "--device-memory",
    "400MiB",
    "--host-memory",
    "1GiB",
    "--disk-capacity",
    "0",
    "--copy-bandwidth",
    "380MB",
)
"""Flags of every server unless others are given: the default model's documents of 2,000 tokens take 92 MB each, so the
device holds four and the host eight; the link loads about 28 tokens while two cores compute one."""
DEFAULTS: dict[str, Any] = {
    "documents": 8,
    "tokens": 2000,
    "max_tokens": 8,
    "rates": "0.5,1,3",
    "seeds": "1,2,3",
    "requests": 30,
    "warm": "host",
    "keep_documents": True,
}
"""Where the load differs from that of `bench serve`."""
_TAKEN = ("--policy", "--scheduler-off")


@dataclass(frozen=True)
class Plan:
    """Variants that take turns, and the runs that each makes. Ratios are to the variant called `baseline`."""

    name: str
    baseline: str
    variants: tuple[Variant, ...]
    draws: tuple[Draw, ...]


def main(arguments: Sequence[str], program: str = "python -m strata.bench policies") -> int:
    """Measures and reports. Returns 0, or 1 if a request failed; raises StrataError."""
    options, rest = parser_of_policies(program).parse_known_args(arguments)
    check(options)
    for flag in _TAKEN:
        if any(given.split("=")[0] == flag for given in rest):
            raise ConfigError(
                f"{flag} is what differs between the servers; give --policies, --parts-off and --parts-of"
            )
    plans = plans_of(options)
    source = Source(options)
    result, stages, failures = asyncio.run(_measure(options, plans, source, rest, program))
    bounds = [bound for stage in stages for bound in bounds_of(stage)]
    result |= {
        "stages": [stage_as_json(stage) for stage in stages],
        "bounds": [bound.as_json() for bound in bounds],
        "failures": failures,
    }
    tables = [table for stage in stages for table in tables_of(stage)]
    emit(result, [*tables, *([bounds_table(bounds)] if bounds else [])], options.json)
    if options.markdown is not None:
        _write(options.markdown, markdown_of(stages))
    return 1 if failures else 0


def parser_of_policies(program: str) -> argparse.ArgumentParser:
    """The flags of `bench serve`, and those of the comparison."""
    parser = parser_of(program)
    parser.description = (
        "The scheduler's policies beside each other on servers of their own that take turns, then one policy with each "
        "of its parts off. Servers start with " + " ".join(EMULATION) + " unless flags say otherwise."
    )
    group = parser.add_argument_group("policies")
    group.add_argument(
        "--policies", default=",".join(POLICIES), help=f"with commas between (default: {','.join(POLICIES)})"
    )
    group.add_argument(
        "--parts-off",
        default=",".join(PARTS),
        help=f"parts to turn off, one at a time; empty: none (default: {','.join(PARTS)})",
    )
    group.add_argument(
        "--parts-of", default="adaptive", help="the policy whose parts they are (default: adaptive)"
    )
    group.add_argument(
        "--parts-rate",
        type=float,
        help="the one rate at which parts are off (default: the greatest of --rates)",
    )
    group.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables as Markdown")
    parser.set_defaults(**DEFAULTS)
    return parser


def plans_of(options: argparse.Namespace) -> list[Plan]:
    """What is run, in this order. Raises ConfigError."""
    if options.url is not None or options.plot is not None:
        raise ConfigError(
            "--url and --plot are for `bench serve`: a policy is a flag of a server that starts here"
        )
    if options.markdown is not None and not options.markdown.expanduser().absolute().parent.is_dir():
        raise ConfigError(f"--markdown {options.markdown}: its folder does not exist; make it")
    draws = tuple(draws_of(options))
    policies = _names("--policies", options.policies, POLICIES)
    off = _names("--parts-off", options.parts_off, PARTS)
    found = []
    if policies:
        variants = tuple(Variant(policy, policy) for policy in policies)
        found.append(Plan("policies", policies[0], variants, draws))
    if off:
        (whole,) = _names("--parts-of", options.parts_of, ("static", "adaptive"))
        rate = options.parts_rate or max(draw.rate or 0.0 for draw in draws)
        mine = tuple(
            Draw(draw.seed, rate, draw.requests, draw.duration_s, draw.keeps_documents) for draw in draws
        )
        variants = (Variant(whole, whole), *(Variant(f"{whole}, no {part}", whole, part) for part in off))
        found.append(Plan("parts", whole, variants, tuple(dict.fromkeys(mine))))
    if not found:
        raise ConfigError("--policies and --parts-off are both empty, and nothing is left to measure")
    return found


def _names(flag: str, text: str, known: Sequence[str]) -> list[str]:
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in known:
            raise ConfigError(f"{flag} {name!r} is none; name some of {', '.join(known)}")
    return list(dict.fromkeys(names))


@contextmanager
def _servers(
    plan: Plan, options: argparse.Namespace, rest: Sequence[str], program: str
) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """Addresses of the plan's servers, and what their settings have in common; they are stopped in any case."""
    chosen = [] if options.model is None else ["--model", options.model]
    with ExitStack() as stack:
        urls: list[str] = []
        settings: dict[str, Any] = {}
        for variant in plan.variants:
            flags = [*EMULATION, *rest, *chosen, "--policy", variant.policy, "--scheduler-off", variant.off]
            config = stack.enter_context(bench_config(flags, program))
            process = ServerProcess(server_arguments(config))
            stack.callback(process.stop)
            urls.append(process.url)
            settings = settings_of(config)
        yield (
            urls,
            {name: value for name, value in settings.items() if name not in ("policy", "scheduler_off")},
        )


async def _measure(
    options: argparse.Namespace, plans: Sequence[Plan], source: Source, rest: Sequence[str], program: str
) -> tuple[dict[str, Any], list[Stage], list[dict[str, Any]]]:
    """What the manifest says of the runs, all stages, and what failed."""
    facts: dict[str, Any] = {}
    stages: list[Stage] = []
    runs: list[Run] = []
    broken: list[dict[str, Any]] = []
    for plan in plans:
        with _servers(plan, options, rest, program) as (urls, settings):
            stage, made, missing, server = await _stage(options, plan, source, urls)
        stages.append(stage)
        runs += made
        broken += missing
        facts = {"settings": settings, "server": server}
    shown = {name: value.name if isinstance(value, Path) else value for name, value in vars(options).items()}
    result = {"manifest": manifest(program, None, flags=shown, emulation=list(EMULATION), **facts)}
    return result, stages, failures_of(runs) + broken


async def _stage(
    options: argparse.Namespace, plan: Plan, source: Source, urls: Sequence[str]
) -> tuple[Stage, list[Run], list[dict[str, Any]], dict[str, Any]]:
    """All runs of a plan, and what kept the last ones from being made: a server that dies takes no result with it."""
    endpoint = endpoint_of(options)
    async with AsyncExitStack() as stack:
        clients, facts = [], await _facts(urls[0], options)
        for url in urls:
            client = OpenAIClient(url, facts.model, options.request_timeout_s, not options.stop_at_eos)
            clients.append(await stack.enter_async_context(client))
        length = options.characters_per_token or await characters_per_token(
            clients[0], endpoint, source.samples(facts)
        )
        workload = source.workload(facts, length)
        benches = [LoadBench(options, client, endpoint, facts, workload) for client in clients]
        drawn = [(draw, workload.sessions(draw)) for draw in plan.draws]
        total = len(benches) * sum(len(session.turns) for _, sessions in drawn for session in sessions)
        _announce(plan, drawn)
        stage, runs, missing = Stage(plan.name, plan.baseline, plan.variants), [], []
        with progress_steps(total) as steps:
            try:
                async for run in _in_turn(stage, benches, drawn, steps):
                    runs.append(run)
            except StrataError as error:
                missing = [
                    {"message": f"{plan.name}: the runs from here on are missing: {error}", "count": 1}
                ]
        return stage, runs, missing, facts.as_json()


async def _in_turn(
    stage: Stage, benches: Sequence[LoadBench], drawn: Sequence[tuple[Draw, Sequence[Session]]], steps: Steps
) -> AsyncIterator[Run]:
    """Within each rate and seed every variant once, each time another one first."""
    for turn, (draw, sessions) in enumerate(drawn):
        for place in range(len(benches)):
            which = (place + turn) % len(benches)
            variant = stage.variants[which]
            try:
                result, run = await benches[which].run(draw, sessions, steps)
            except StrataError as error:
                raise StrataError(f"{variant.name} at {draw.rate:g}/s, seed {draw.seed}: {error}") from error
            stage.add(variant, result)
            yield run


async def _facts(url: str, options: argparse.Namespace) -> ServerFacts:
    async with make_http(url, options.request_timeout_s) as http:
        facts = await look_at(http, None)
    check_warm(options.warm, facts)
    return facts


def _announce(plan: Plan, drawn: Sequence[tuple[Draw, Sequence[Session]]]) -> None:
    """How long it will take at least, before it begins."""
    arrivals = sum(sessions[-1].arrival_s for _, sessions in drawn) * len(plan.variants)
    runs = len(drawn) * len(plan.variants)
    print(
        f"{plan.name}: {runs} runs on {len(plan.variants)} servers; requests arrive for {arrivals / 60:.1f} minutes in "
        "all, and each server first computes every document",
        file=sys.stderr,
    )


def _write(where: Path, text: str) -> None:
    try:
        where.expanduser().write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--markdown {where} cannot be written: {error}; give another file") from error
