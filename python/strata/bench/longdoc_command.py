"""`bench longdoc`: its flags, and its result as a table and as JSON."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from strata.bench.corpus import Prompt, default_documents, make_prompts, read_documents
from strata.bench.http_target import HttpTarget
from strata.bench.longdoc import LongDoc, Round, Shape, bounds_of, summarise
from strata.bench.reference import BarePool, Reference, load_reference
from strata.bench.report import (
    JSON_HELP,
    Bound,
    bounds_table,
    check_json_path,
    emit,
    progress_steps,
    table_of,
)
from strata.bench.settings import ENGINE_FLAGS_HELP, bench_config, check_least, manifest, settings_of
from strata.bench.target import EngineTarget, Target
from strata.config import ModelOptions, StrataConfig
from strata.engine.runtime_options import PoolSizes
from strata.engine.served_model import ServedModel, load_served_model
from strata.errors import ConfigError

LoadModel = Callable[[ModelOptions], ServedModel]


def parser_of(program: str) -> argparse.ArgumentParser:
    """The flags of this measurement; what it does not know is left to `strata.config`."""
    parser = argparse.ArgumentParser(
        prog=program,
        allow_abbrev=False,
        description="Time to first token of questions over long documents: computed, then from every tier.",
        epilog=ENGINE_FLAGS_HELP,
    )
    parser.add_argument(
        "--docs",
        type=Path,
        metavar="FILE",
        help="documents in LooGLE's form (JSON lines); default: the help topics that come with Python",
    )
    parser.add_argument("--tokens", type=int, default=4000, help="tokens of every prompt (default: 4000)")
    parser.add_argument(
        "--pairs",
        "--rounds",
        type=int,
        default=7,
        dest="pairs",
        help="rounds, each over a text of its own; results are medians (default: 7)",
    )
    parser.add_argument(
        "--questions",
        type=int,
        default=2,
        help="questions about each text; the first is measured in every tier, the others are asked while the "
        "text is on the device (default: 2)",
    )
    parser.add_argument("--max-tokens", type=int, default=16, help="tokens of every answer (default: 16)")
    parser.add_argument(
        "--http",
        action="store_true",
        help="ask a server over HTTP, a process that really stops and starts, instead of an engine in this process; "
        "without disk_gbps, which needs the engine's own counters",
    )
    parser.add_argument("--json", metavar="FILE", help=JSON_HELP)
    return parser


def main(
    arguments: Sequence[str],
    program: str = "python -m strata.bench longdoc",
    load: LoadModel = load_served_model,
) -> int:
    """Measures and reports. Returns 0; raises StrataError."""
    options, rest = parser_of(program).parse_known_args(arguments)
    check_least(options, (("tokens", 32), ("pairs", 1), ("questions", 1), ("max_tokens", 1)))
    check_json_path(options.json)
    documents = read_documents(options.docs) if options.docs else default_documents()
    with bench_config(rest, program) as config:
        served = load(config.model)
        if served.tokenizer is None:
            raise ConfigError(f"--model {config.model.model} has no tokenizer, and longdoc asks in words")
        shape = shape_of(options, config, served)
        shape.check_fits(config.cache)
        prompts = make_prompts(documents, served.tokenizer, options.tokens, options.pairs, options.questions)
        reference = load_reference(served.model, config.model.model, from_folder=load is load_served_model)
        facts = manifest(
            program,
            None,
            arguments=list(arguments),
            settings=settings_of(config),
            model=served.name,
            dtype=str(served.model.dtype).removeprefix("torch."),
            torch=torch.__version__,
            torch_threads=torch.get_num_threads(),
            reference=reference.label,
            documents=options.docs.name if options.docs else "pydoc_data.topics",
            transport="HTTP" if options.http else "Engine API",
            restart=f"a new {'server' if options.http else 'engine in the same'} process, page cache dropped",
            cache_state="all tiers flushed before every round",
        )
        rounds = run_rounds(config, served, reference, shape, prompts, over_http=options.http)
    summary = summarise(rounds, shape)
    bounds = bounds_of(summary)
    result = {
        **summary,
        "bounds": [bound.as_json() for bound in bounds],
        "rounds": [dataclasses.asdict(this) for this in rounds],
        "manifest": facts,
    }
    emit(result, tables_of(summary, rounds, bounds, reference.label), options.json)
    return 0


def run_rounds(
    config: StrataConfig,
    served: ServedModel,
    reference: Reference,
    shape: Shape,
    prompts: Sequence[Prompt],
    over_http: bool,
) -> list[Round]:
    """A round for each prompt, with a progress bar; the engine or server is stopped in any case."""
    in_process = None if over_http else EngineTarget(config, served)
    target: Target = in_process or HttpTarget(config)
    try:
        bare = BarePool(served.model, shape.tokens, 1)
        bench = LongDoc(target, reference, shape, bare, in_process.read_from_disk if in_process else None)
        with progress_steps(1 + len(prompts) * bench.steps_per_round()) as steps:
            steps.next("warming up")
            bench.warm_up(prompts[0])
            return [
                bench.run(index, prompt, steps, config.cache.disk_path)
                for index, prompt in enumerate(prompts)
            ]
    finally:
        target.close()


def shape_of(options: argparse.Namespace, config: StrataConfig, served: ServedModel) -> Shape:
    """Sizes of what is measured, from flags and model."""
    sizes = PoolSizes.of(served.model, config.cache)
    host = sizes.host_pages > 0
    return Shape(
        tokens=options.tokens,
        max_tokens=options.max_tokens,
        page_size=config.cache.page_size,
        page_bytes=sizes.page_bytes,
        host=host,
        disk=host and config.cache.disk_capacity > 0,
        copy_threads=sizes.copy_threads,
        disk_threads=config.cache.disk_threads,
    )


def tables_of(
    summary: dict[str, Any], rounds: Sequence[Round], bounds: Sequence[Bound], reference: str
) -> list[Table]:
    """The result for people."""
    names = {
        "reference_prefill_s": f"reference prefill ({reference})",
        "cold_ttft_s": "cold",
        "bare_forward_s": f"bare forward of {summary['computed_tokens']} tokens over the context",
        "device_ttft_s": "device hit",
        "follow_up_ttft_s": "another question, device hit",
        "host_ttft_s": "host hit",
        "disk_ttft_s": "disk hit after a restart",
        "disk_read_s": "disk read alone",
    }
    rows = []
    for key, name in names.items():
        values = [
            value
            for this in rounds
            for found in [getattr(this, key)]
            for value in (found if isinstance(found, list) else [found])
            if value is not None
        ]
        if values:
            rows.append((name, f"{summary[key]:.4f}", f"{min(values):.4f}", f"{max(values):.4f}"))
    title = f"{summary['tokens']:,} tokens, {len(rounds)} rounds: seconds to the first token"
    rates = [
        (name, f"{summary[key]:.2f}")
        for key, name in (
            ("copy_gbps", "copy in memory (the faster yardstick)"),
            ("disk_gbps", "the engine's disk reads"),
            ("raw_disk_gbps", "plain O_DIRECT reads"),
        )
        if summary[key] is not None
    ]
    rates.append(("KV bytes of the cached tokens", f"{summary['kv_bytes'] / 1e9:.3f} GB"))
    rates.append(("same greedy tokens from every tier", "yes" if summary["tokens_equal"] else "NO"))
    return [
        table_of(title, ("what", "median", "least", "most"), rows),
        table_of("bandwidth (GB/s) and checks", ("what", "value"), rates),
        bounds_table(bounds),
    ]
