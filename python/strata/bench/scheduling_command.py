"""`bench scheduling`: its flags, its bounds, and its result as tables and as JSON."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from strata.bench.corpus import default_documents, make_prompts, read_documents
from strata.bench.decode_command import random_prompts
from strata.bench.report import (
    JSON_HELP,
    Bound,
    Steps,
    bounds_table,
    check_json_path,
    emit,
    median,
    progress_steps,
    table_of,
)
from strata.bench.scheduling import Pair, host_hit, sharers
from strata.bench.settings import ENGINE_FLAGS_HELP, bench_config, check_least, manifest, settings_of
from strata.bench.tiers import with_cache
from strata.config import ModelOptions, StrataConfig
from strata.engine.served_model import ServedModel, load_served_model
from strata.errors import ConfigError

LoadModel = Callable[[ModelOptions], ServedModel]
PARTS = ("sharers", "host-hit")
SHARERS_BOUND = 1.1
HOST_HIT_BOUND = 1.3
BANDWIDTHS = {"380 MB/s": 380_000_000, "as fast as it goes": 0}
"""The links between host and device: emulated near the paper's break-even on two cores, and not throttled."""
_PROMPT_TOKENS = 64


def parser_of(program: str) -> argparse.ArgumentParser:
    """The flags of this measurement; what it does not know is left to `strata.config`."""
    parser = argparse.ArgumentParser(
        prog=program,
        allow_abbrev=False,
        description="What the scheduler may not cost: sharers of a prefix on the device with deferral on and off, and "
        "a host hit beside decoding streams under adaptive and under fcfs. Sizes of tiers are the measurement's own.",
        epilog=ENGINE_FLAGS_HELP,
    )
    parser.add_argument(
        "--parts", default=",".join(PARTS), help=f"with commas between (default: {','.join(PARTS)})"
    )
    parser.add_argument(
        "--docs", type=Path, metavar="FILE", help="documents in LooGLE's form; default: Python's help topics"
    )
    parser.add_argument("--tokens", type=int, default=2000, help="tokens of a document (default: 2000)")
    parser.add_argument("--pairs", type=int, default=5, help="pairs of each comparison (default: 5)")
    parser.add_argument("--sharers", type=int, default=50, help="requests at once (default: 50)")
    parser.add_argument("--question-tokens", type=int, default=16, help="tokens of each (default: 16)")
    parser.add_argument("--streams", type=int, default=4, help="streams that decode (default: 4)")
    parser.add_argument(
        "--stream-tokens", type=int, default=500, help="most tokens that each decodes (default: 500)"
    )
    parser.add_argument("--json", metavar="FILE", help=JSON_HELP)
    return parser


def main(
    arguments: Sequence[str],
    program: str = "python -m strata.bench scheduling",
    load: LoadModel = load_served_model,
) -> int:
    """Measures and reports. Returns 0; raises StrataError."""
    options, rest = parser_of(program).parse_known_args(arguments)
    least = (
        ("tokens", 64),
        ("pairs", 1),
        ("sharers", 1),
        ("question_tokens", 1),
        ("streams", 1),
        ("stream_tokens", 8),
    )
    check_least(options, least)
    check_json_path(options.json)
    parts = options.parts.split(",")
    for part in parts:
        if part not in PARTS:
            raise ConfigError(f"--parts {part!r} is no part; name some of {', '.join(PARTS)}")
    with bench_config(rest, program) as config:
        served = load(config.model)
        facts = manifest(
            program,
            0,
            arguments=list(arguments),
            settings=settings_of(config),
            model=served.name,
            documents=options.docs.name if options.docs else "pydoc_data.topics",
        )
        result, bounds = measure(options, parts, config, served)
    result |= {"bounds": [bound.as_json() for bound in bounds], "manifest": facts}
    emit(result, [*tables_of(result), bounds_table(bounds)], options.json)
    return 0


def measure(
    options: argparse.Namespace, parts: Sequence[str], config: StrataConfig, served: ServedModel
) -> tuple[dict[str, Any], list[Bound]]:
    """The parts that were asked for, and their bounds."""
    if served.tokenizer is None:
        raise ConfigError(
            f"--model {config.model.model} has no tokenizer, and this measurement asks in words"
        )
    texts = read_documents(options.docs) if options.docs else default_documents()
    made = make_prompts(texts, served.tokenizer, options.tokens, 1 + options.pairs * len(BANDWIDTHS), 1)
    prefix, *prompts = [prompt.token_ids for prompt in made]
    comparisons: list[dict[str, Any]] = []
    bounds: list[Bound] = []
    total = options.pairs * (("sharers" in parts) + len(BANDWIDTHS) * ("host-hit" in parts))
    with progress_steps(total) as steps:
        if "sharers" in parts:
            pairs = _sharers(options, config, served, prefix, steps)
            comparisons.append(_comparison("sharers", "without deferral", pairs))
            deferred = sum(pair.ours.deferred for pair in pairs)
            bounds.append(Bound("sharers: deferred", deferred, 0, "", "none, as the prefix is on the device"))
            rule = "mean TTFT with deferral / without, median over the pairs"
            bounds.append(Bound("sharers: TTFT", comparisons[-1]["ratio"], SHARERS_BOUND, "x", rule))
        if "host-hit" in parts:
            streams = random_prompts(served.model.config.vocab_size, options.streams, _PROMPT_TOKENS, 1)
            for index, (name, bandwidth) in enumerate(BANDWIDTHS.items()):
                mine = prompts[index * options.pairs : (index + 1) * options.pairs]
                own = with_cache(config, copy_bandwidth=bandwidth)
                pairs = host_hit(own, served, mine, streams, options.stream_tokens, steps)
                comparisons.append(_comparison(f"host hit, link {name}", "fcfs", pairs))
                rule = "TTFT under adaptive / under fcfs, median over the pairs"
                bounds.append(Bound(f"host hit, {name}", comparisons[-1]["ratio"], HOST_HIT_BOUND, "x", rule))
    return {"tokens": options.tokens, "comparisons": comparisons}, bounds


def _sharers(
    options: argparse.Namespace,
    config: StrataConfig,
    served: ServedModel,
    prefix: Sequence[int],
    steps: Steps,
) -> list[Pair]:
    questions = [
        random_prompts(served.model.config.vocab_size, options.sharers, options.question_tokens, 100 + number)
        for number in range(options.pairs)
    ]
    return sharers(config, served, prefix, questions, steps)


def _comparison(name: str, beside: str, pairs: Sequence[Pair]) -> dict[str, Any]:
    return {
        "name": name,
        "beside": beside,
        "ratio": median([pair.ratio for pair in pairs]),
        "pairs": [asdict(pair) | {"ratio": pair.ratio} for pair in pairs],
    }


def tables_of(result: dict[str, Any]) -> list[Table]:
    """The result for people."""
    columns = (
        "pair",
        "TTFT s",
        "the other s",
        "ratio",
        "stall s",
        "the other s",
        "gap s",
        "the other s",
        "deferred",
    )
    found = []
    for each in result["comparisons"]:
        rows = [
            (
                str(number),
                *(f"{pair[side]['ttft_s']:.3f}" for side in ("ours", "theirs")),
                f"{pair['ratio']:.3f}",
                *(f"{pair[side][name]:.3f}" for name in ("stall_s", "gap_s") for side in ("ours", "theirs")),
                str(pair["ours"]["deferred"]),
            )
            for number, pair in enumerate(each["pairs"], start=1)
        ]
        found.append(table_of(f"{each['name']}, beside {each['beside']}", columns, rows))
    return found
