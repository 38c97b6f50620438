"""`bench predict`: one workload's step log gives this machine's profile; the simulator then predicts other workloads
and rates, which are run only after that.

Both go through one server of our own. A prediction is of the very requests of the runs: the load generator's schedule,
with the server's tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from strata.bench.http_target import ServerProcess, server_arguments
from strata.bench.load.client import OpenAIClient, make_http
from strata.bench.load.explicit import explicit_workload
from strata.bench.load.measures import Figures, failures_of, figures_of
from strata.bench.load.runner import Run
from strata.bench.load.schedule import Draw, Session
from strata.bench.load.server import ServerFacts, characters_per_token, look_at
from strata.bench.report import JSON_HELP, Steps, check_json_path, emit, progress_steps, table_of
from strata.bench.serve_command import LoadBench
from strata.bench.serve_flags import Source, check, draws_of, endpoint_of, parser_of
from strata.bench.settings import ENGINE_FLAGS_HELP, bench_config, check_least, manifest, settings_of
from strata.errors import ConfigError, StorageError
from strata.models import Tokenizer, load_tokenizer, resolve_model
from strata.models.config import load_config
from strata.simulate import configure, simulate
from strata.simulate.profile import (
    LEAST_STEPS,
    Profile,
    fit_profile,
    read_model,
    table_with,
)
from strata.simulate.served import SERVED, server_overrides
from strata.simulate.step_log import StepLog, read_step_log

FIT = "--documents 4 --tokens 1000 --max-tokens 16 --rates 0.2 --requests 16"
PREDICT = "--workload chat --documents 8 --tokens 1000 --rounds 4 --think-s 4 --max-tokens 24 --rates 0.5 --requests 24"
FIGURES = (("ttft_s_mean", "mean TTFT, s"), ("output_tokens_per_s", "output tokens/s"))
WITHIN = 0.15
"""A prediction may be off by this part of what was measured, or by twice the spread of the real runs."""
_LOG_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Load:
    """One workload at one rate: what `bench serve` would run with these flags, and what it is called."""

    name: str
    options: argparse.Namespace
    draw: Draw
    sessions: Sequence[Session]
    bench: LoadBench

    @property
    def requests(self) -> int:
        """Of one run."""
        return sum(len(session.turns) for session in self.sessions)


def main(arguments: Sequence[str], program: str = "python -m strata.bench predict") -> int:
    """Runs, fits, predicts, runs again and tells. Returns 0, or 1 if a request failed; raises StrataError."""
    options, rest = _parser(program).parse_known_args(arguments)
    check_least(options, [("runs", 1)])
    check_json_path(options.json)
    flags = [("fit", options.fit), *(("predict", text) for text in options.predict or [PREDICT])]
    loads = [_serve_options(flag, text, options.docs, program) for flag, text in flags]
    with (
        tempfile.TemporaryDirectory(prefix="strata-predict-") as folder,
        bench_config(rest, program) as config,
    ):
        if config.cache.disk_capacity > 0:
            raise ConfigError(
                "a disk's speed is not in a step log, so that a server with a disk tier cannot be fitted to it: give "
                "--disk-capacity 0"
            )
        log = Path(options.step_log or Path(folder) / "steps.jsonl")
        model = resolve_model(config.model.model)
        process = ServerProcess([*server_arguments(config), "--step-log", str(log)])
        try:
            result = asyncio.run(_measure(options, loads, process.url, model, log))
        finally:
            process.stop()
        result["manifest"] = manifest(
            program, None, fit=options.fit, predict=options.predict or [PREDICT], settings=settings_of(config)
        )
    emit(result, tables_of(result), options.json)
    return 1 if result["failures"] else 0


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program,
        allow_abbrev=False,
        description="Fits this machine to the step log of one workload, predicts others by simulation, then runs them.",
        epilog=ENGINE_FLAGS_HELP,
    )
    parser.add_argument(
        "--fit",
        default=FIT,
        metavar="FLAGS",
        help="flags of `bench serve` for the workload to fit (default: %(default)s)",
    )
    parser.add_argument(
        "--predict",
        action="append",
        metavar="FLAGS",
        help=f"flags of `bench serve` for a workload to predict; may be given several times (default: {PREDICT})",
    )
    parser.add_argument("--docs", metavar="D", help="as --docs of `bench serve`, for all workloads")
    parser.add_argument(
        "--runs", type=int, default=3, help="real runs of each predicted workload (default: %(default)s)"
    )
    parser.add_argument("--step-log", metavar="FILE", help="keep the server's step log there")
    parser.add_argument("--json", metavar="FILE", help=JSON_HELP)
    return parser


def _serve_options(flag: str, text: str, docs: str | None, program: str) -> tuple[str, argparse.Namespace]:
    """The flags in `text`, checked. Raises ConfigError."""
    given = shlex.split(text)
    options, unknown = parser_of(program).parse_known_args([*given, *(["--docs", docs] if docs else [])])
    if unknown:
        raise ConfigError(
            f"--{flag}: {' '.join(unknown)} is no flag of `bench serve`; the server's own stand beside it"
        )
    if options.url or options.json or options.plot or options.warm or options.stop_at_eos:
        raise ConfigError(
            f"--{flag} {text!r}: --url, --json, --plot, --warm and --stop-at-eos cannot be predicted; leave them out"
        )
    check(options)
    if options.workload == "trace" or len(draws_of(options)) > 1:
        raise ConfigError(
            f"--{flag} {text!r}: give one rate and one seed of documents or chats; it is run --runs times"
        )
    return text, options


async def _measure(
    options: argparse.Namespace,
    loads: Sequence[tuple[str, argparse.Namespace]],
    url: str,
    folder: Path,
    log: Path,
) -> dict[str, Any]:
    tokenizer = load_tokenizer(folder, load_config(folder))
    timeout_s = max(load.request_timeout_s for _, load in loads)
    async with make_http(url, timeout_s) as http:
        facts = await look_at(http, None)
    async with OpenAIClient(url, facts.model, timeout_s, ignore_eos=True) as client:
        drawn = [await _load(text, load, client, facts) for text, load in loads]
        fitted, predicted = drawn[0], drawn[1:]
        runs = sum(load.requests * options.runs for load in predicted) + fitted.requests
        with progress_steps(runs) as steps:
            figures, run = await _run(fitted, steps)
            steps_log = await _log_of(log)
            profile = fit_profile(steps_log, read_model(folder))
            results = [_result(fitted, [figures], _simulated(profile, steps_log, fitted, tokenizer))]
            failed = [run]
            # All are predicted before the first is run.
            forecasts = [_simulated(profile, steps_log, load, tokenizer) for load in predicted]
            for load, forecast in zip(predicted, forecasts, strict=True):
                real = [await _run(load, steps) for _ in range(options.runs)]
                failed += [run for _, run in real]
                results.append(_result(load, [figures for figures, _ in real], forecast))
    return {
        "fit": {
            "hardware": profile.hardware,
            "steps": len(steps_log),
            "residuals": {kind: asdict(of) for kind, of in profile.residuals.items()},
            **results[0],
        },
        "predictions": results[1:],
        "failures": failures_of(failed),
    }


async def _load(text: str, options: argparse.Namespace, client: OpenAIClient, facts: ServerFacts) -> Load:
    # One run is repeated: what differs then is the machine, not the requests.
    (draw,) = draws_of(options)
    source, endpoint = Source(options), endpoint_of(options)
    length = options.characters_per_token or await characters_per_token(
        client, endpoint, source.samples(facts)
    )
    workload = source.workload(facts, length)
    return Load(
        text,
        options,
        draw,
        workload.sessions(draw),
        LoadBench(options, client, endpoint, facts, workload),
    )


async def _run(load: Load, steps: Steps) -> tuple[Figures, Run]:
    _, run = await load.bench.run(load.draw, load.sessions, steps)
    return figures_of(run), run


async def _log_of(path: Path) -> StepLog:
    """The log once it no longer grows: lines are written twice a second. Raises StorageError if there are none."""
    deadline = time.monotonic() + _LOG_TIMEOUT_S
    size = -1
    while time.monotonic() < deadline:
        await asyncio.sleep(1.5)
        now = path.stat().st_size
        if now == size:
            log = read_step_log(path)
            if len(log) >= LEAST_STEPS:
                return log
        size = now
    raise StorageError(
        f"the server's step log has not come to {LEAST_STEPS} steps within {_LOG_TIMEOUT_S:g} s; give --fit more "
        "requests"
    )


def _simulated(profile: Profile, log: StepLog, load: Load, tokenizer: Tokenizer) -> dict[str, Any]:
    overrides = server_overrides(log)
    config = configure(
        str(profile.hardware["name"]), SERVED, SERVED, "loogle", overrides, table_with(profile, log)
    )
    config["workload"] = explicit_workload(load.sessions, endpoint_of(load.options), tokenizer)
    config["max_in_flight"] = load.options.max_in_flight
    report = simulate(config)
    return {
        "ttft_s_mean": report["ttft_from_due"]["mean"],
        "output_tokens_per_s": report["output_tokens_per_s"],
        "report": report,
    }


def _result(load: Load, real: Sequence[Figures], forecast: Mapping[str, Any]) -> dict[str, Any]:
    """A workload's figures: predicted, each real run's, and whether the prediction is close enough."""
    found: dict[str, Any] = {"workload": load.name, "requests": load.requests, "figures": {}}
    for name, _ in FIGURES:
        values = [figures[name] for figures in real]
        mean, spread = sum(values) / len(values), max(values) - min(values)
        off = abs(forecast[name] - mean)
        found["figures"][name] = {
            "predicted": forecast[name],
            "real": values,
            "mean": mean,
            "spread": spread,
            "ratio": forecast[name] / mean,
            "allowed": max(WITHIN * mean, 2 * spread),
            "holds": off <= max(WITHIN * mean, 2 * spread),
        }
    return {**found, "runs": list(real), "simulation": forecast["report"]}


def tables_of(result: Mapping[str, Any]) -> list[Table]:
    """The fit's residuals, then each workload's figures."""
    residuals = [
        (kind, str(of["count"]), f"{of['median']:.1%}", f"{of['p90']:.1%}", f"{of['total_ratio']:.3f}")
        for kind, of in result["fit"]["residuals"].items()
    ]
    tables = [
        table_of(
            "steps of the fit", ("kind", "steps", "error, median", "P90", "predicted / measured"), residuals
        )
    ]
    for found, what in [(result["fit"], "fitted"), *((each, "predicted") for each in result["predictions"])]:
        rows = [
            (
                title,
                f"{figure['predicted']:.3f}",
                ", ".join(f"{value:.3f}" for value in figure["real"]),
                f"{figure['ratio']:.3f}",
                "yes" if figure["holds"] else "NO",
            )
            for name, title in FIGURES
            for figure in [found["figures"][name]]
        ]
        title = f"{what}: {found['workload']}"
        tables.append(
            table_of(title, ("", "simulated", "real runs", "simulated / real", "close enough"), rows)
        )
    return tables
