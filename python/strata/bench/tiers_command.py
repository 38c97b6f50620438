"""`bench tiers`: its flags, its bounds, and its result as tables and as JSON."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from strata.bench import tiers
from strata.bench.corpus import default_documents, make_prompts, read_documents
from strata.bench.decode_command import random_prompts
from strata.bench.report import (
    JSON_HELP,
    Bound,
    bounds_table,
    check_json_path,
    emit,
    median,
    progress_steps,
    table_of,
)
from strata.bench.settings import ENGINE_FLAGS_HELP, bench_config, check_least, manifest, settings_of
from strata.config import ModelOptions, StrataConfig
from strata.engine.runtime_options import PoolSizes
from strata.engine.served_model import ServedModel, load_served_model
from strata.errors import ConfigError

LoadModel = Callable[[ModelOptions], ServedModel]
PARTS = ("slow-disk", "cycle", "decode", "beside-copies")
BANDWIDTHS = {5 * tiers.MB: 1.1, 50 * tiers.MB: 1.0}
"""Bytes a second of the emulated disks, and what TTFT may be at most, over TTFT without any cache."""
CYCLE_HITS = 0.8
DECODE_SHARE = 0.95
NICENESS = (0, 10)
_ROUNDS_OF_CYCLE = 3


def parser_of(program: str) -> argparse.ArgumentParser:
    """The flags of this measurement; what it does not know is left to `strata.config`."""
    parser = argparse.ArgumentParser(
        prog=program,
        allow_abbrev=False,
        description="The tiers beside the same model with its tiers off: over slow disks, with documents of twice the "
        "device tier asked in turn, and while tokens are decoded. Sizes of tiers are the measurement's own.",
        epilog=ENGINE_FLAGS_HELP,
    )
    parser.add_argument(
        "--parts",
        default=",".join(PARTS),
        help=f"what to measure, with commas between: {', '.join(PARTS)} (default: all)",
    )
    parser.add_argument(
        "--docs", type=Path, metavar="FILE", help="documents in LooGLE's form; default: Python's help topics"
    )
    parser.add_argument("--tokens", type=int, default=2000, help="tokens of every prompt (default: 2000)")
    parser.add_argument("--pairs", type=int, default=3, help="pairs of each comparison (default: 3)")
    parser.add_argument("--streams", type=int, default=6, help="streams that decode (default: 6)")
    parser.add_argument(
        "--prompt-tokens", type=int, default=128, help="tokens of their prompts (default: 128)"
    )
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens that each decodes (default: 64)")
    parser.add_argument("--json", metavar="FILE", help=JSON_HELP)
    return parser


def main(
    arguments: Sequence[str],
    program: str = "python -m strata.bench tiers",
    load: LoadModel = load_served_model,
) -> int:
    """Measures and reports. Returns 0; raises StrataError."""
    options, rest = parser_of(program).parse_known_args(arguments)
    check_least(
        options, (("tokens", 64), ("pairs", 1), ("streams", 1), ("prompt_tokens", 1), ("new_tokens", 2))
    )
    check_json_path(options.json)
    parts = options.parts.split(",")
    for part in parts:
        if part not in PARTS:
            raise ConfigError(f"--parts {part!r} is no part; name some of {', '.join(PARTS)}")
    with bench_config(rest, program) as config:
        served = load(config.model)
        if served.tokenizer is None:
            raise ConfigError(f"--model {config.model.model} has no tokenizer, and tiers asks in words")
        facts = manifest(
            program,
            0,
            arguments=list(arguments),
            settings=settings_of(config),
            model=served.name,
            dtype=str(served.model.dtype).removeprefix("torch."),
            torch=torch.__version__,
            torch_threads=torch.get_num_threads(),
            documents=options.docs.name if options.docs else "pydoc_data.topics",
            emulation="a disk's bandwidth is emulated; the engine is not told of it",
        )
        result, bounds = measure(options, parts, config, served)
    result |= {"bounds": [bound.as_json() for bound in bounds], "manifest": facts}
    emit(result, [*tables_of(result), bounds_table(bounds)], options.json)
    return 0


def measure(
    options: argparse.Namespace, parts: Sequence[str], config: StrataConfig, served: ServedModel
) -> tuple[dict[str, Any], list[Bound]]:
    """The parts that were asked for, and their bounds."""
    page_bytes = PoolSizes.of(served.model, tiers.tiers_off(config).cache).page_bytes
    prompt_bytes = -(-options.tokens // config.cache.page_size) * page_bytes
    documents = -(-2 * tiers.DEVICE_MEMORY // prompt_bytes)
    slow = options.pairs * len(BANDWIDTHS) if "slow-disk" in parts else 0
    cycled = documents if "cycle" in parts else 0
    texts = read_documents(options.docs) if options.docs else default_documents()
    prompts: list[list[int]] = []
    if served.tokenizer is not None and slow + cycled:
        made = make_prompts(texts, served.tokenizer, options.tokens, slow + cycled, 1)
        prompts = [prompt.token_ids for prompt in made]

    def random(seed: int) -> list[list[int]]:
        return random_prompts(served.model.config.vocab_size, options.streams, options.prompt_tokens, seed)

    result: dict[str, Any] = {"tokens": options.tokens, "prompt_kv_bytes": prompt_bytes}
    bounds: list[Bound] = []
    total = slow + bool(slow) + _ROUNDS_OF_CYCLE * cycled
    total += options.pairs * (("decode" in parts) + ("beside-copies" in parts))
    with progress_steps(total) as steps:
        if slow:
            _slow_disk(options.pairs, config, served, prompts[:slow], steps, result, bounds)
        if cycled:
            own = tiers.with_tiers(config, "cycle", host_memory=tiers.CYCLE_HOST_MEMORY)
            rounds = tiers.cycle(own, served, prompts[slow:], _ROUNDS_OF_CYCLE, steps)
            result["cycle"] = [asdict(each) | {"hit_share": each.hit_share} for each in rounds]
            rule = f"prompt tokens computed in round {_ROUNDS_OF_CYCLE} of {cycled} documents / all"
            bounds.append(Bound("documents in turn", 1 - rounds[-1].hit_share, 1 - CYCLE_HITS, "", rule))
        if "decode" in parts:
            own = tiers.with_tiers(config, "decode")
            pairs = tiers.decode(own, served, random, options.new_tokens, options.pairs, steps)
            result["decode"] = [asdict(each) for each in pairs]
            slower = median([each.off_tokens_per_s for each in pairs]) / median(
                [each.tokens_per_s for each in pairs]
            )
            rule = "tokens/s with tiers off / with all tiers, their pages backed up and spilled meanwhile"
            bounds.append(Bound("decode", slower, 1 / DECODE_SHARE, "x", rule))
        if "beside-copies" in parts:
            beside = tiers.decode_beside_copies(
                config, served, random, options.new_tokens, options.pairs, NICENESS, steps
            )
            result["beside_copies"] = [asdict(each) for each in beside]
    return result, bounds


def _slow_disk(
    count: int,
    config: StrataConfig,
    served: ServedModel,
    prompts: Sequence[Sequence[int]],
    steps: Any,
    result: dict[str, Any],
    bounds: list[Bound],
) -> None:
    own = tiers.with_tiers(config, "slow-disk")
    steps.next("slow disk: writing its pages")
    tiers.fill_disk(own, served, prompts)
    result["slow_disk"] = []
    for index, (bandwidth, most) in enumerate(BANDWIDTHS.items()):
        mine = prompts[index * count : (index + 1) * count]
        pairs = tiers.slow_disk(own, served, mine, bandwidth, steps)
        ratio = median([each.ttft_s for each in pairs]) / median([each.off_ttft_s for each in pairs])
        rows = [asdict(each) | {"ratio": each.ratio} for each in pairs]
        result["slow_disk"].append({"bytes_per_s": bandwidth, "ratio": ratio, "pairs": rows})
        name = f"disk of {bandwidth // tiers.MB} MB/s"
        rule = "TTFT with the pages on disk alone / TTFT with the tiers off"
        bounds.append(Bound(name, ratio, most, "x", rule))
        bounds.append(Bound(f"{name}, just started", pairs[0].ratio, most, "x", "the first pair's"))


def tables_of(result: dict[str, Any]) -> list[Table]:
    """The result for people."""
    found: list[Table] = []
    rows: list[tuple[str, ...]]
    columns: tuple[str, ...]
    for disk in result.get("slow_disk", []):
        rows = [
            (
                str(number),
                *(f"{pair[name]:.3f}" for name in ("ttft_s", "off_ttft_s", "ratio")),
                *(f"{pair[name]:,}" for name in ("disk_tokens", "recomputed_tokens")),
                "yes" if pair["tokens_equal"] else "NO",
            )
            for number, pair in enumerate(disk["pairs"], start=1)
        ]
        columns = ("pair", "TTFT s", "tiers off s", "ratio", "from disk", "computed instead", "same tokens")
        title = f"disk of {disk['bytes_per_s'] / tiers.MB:g} MB/s, {result['tokens']:,} tokens a prompt"
        found.append(table_of(title, columns, rows))
    if "cycle" in result:
        rows = [
            (
                str(number),
                *(f"{each[name]:,}" for name in ("device", "host", "disk", "computed")),
                f"{100 * each['hit_share']:.1f} %",
                f"{each['ttft_s']:.3f}",
            )
            for number, each in enumerate(result["cycle"], start=1)
        ]
        columns = ("round", "device", "host", "disk", "computed", "hits", "median TTFT s")
        found.append(table_of("documents in turn: prompt tokens by source", columns, rows))
    if "decode" in result:
        names = ("tokens_per_s", "off_tokens_per_s", "backup_pages", "spill_pages")
        rows = [
            (str(number), *(f"{each[name]:.1f}" for name in names))
            for number, each in enumerate(result["decode"], start=1)
        ]
        columns = ("pair", "tokens/s", "tiers off", "pages backed up", "pages spilled")
        found.append(table_of("decode with all tiers and with none", columns, rows))
    if "beside_copies" in result:
        rows = []
        for nice in NICENESS:
            rates = [each["beside"][nice] / each["alone"] for each in result["beside_copies"]]
            copied = [each["copied_gbps"][nice] for each in result["beside_copies"]]
            rows.append((f"niceness {nice}", f"{median(rates):.3f}", f"{median(copied):.2f}"))
        columns = ("copies without pause beside it", "decode / alone", "copies GB/s")
        found.append(table_of("decode beside copies (no bound)", columns, rows))
    return found
