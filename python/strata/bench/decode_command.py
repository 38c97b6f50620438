"""`bench decode`: tokens a second of a batch of streams, the engine beside batched `transformers` with
its cache.

Only decoding counts: on the engine's side the time in which all streams run, from the last one's first
token to the first one's last; on the other side the loop after the prefill. Rounds take turns in order A B,
B A.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from rich.table import Table

from strata.bench.reference import Reference, load_reference
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
from strata.config import ModelOptions
from strata.engine import GenerationRequest, SamplingParams
from strata.engine.engine import Engine
from strata.engine.served_model import ServedModel, load_served_model

LoadModel = Callable[[ModelOptions], ServedModel]


@dataclass(frozen=True)
class Round:
    """Tokens a second of both sides, and the part of the streams whose tokens are the same."""

    engine_tokens_per_s: float
    reference_tokens_per_s: float
    equal_streams: float


def random_prompts(vocabulary: int, streams: int, tokens: int, seed: int) -> list[list[int]]:
    """Prompts of equal length that share nothing."""
    generator = np.random.default_rng(seed)
    prompts: list[list[int]] = generator.integers(0, vocabulary, (streams, tokens)).tolist()
    return prompts


def engine_decode(
    engine: Engine, prompts: Sequence[Sequence[int]], new_tokens: int
) -> tuple[float, list[list[int]]]:
    """Tokens a second while all streams decode, and each stream's 1 + `new_tokens` tokens."""
    sampling = SamplingParams(max_tokens=1 + new_tokens, ignore_eos=True)

    async def read(prompt: Sequence[int]) -> list[tuple[float, int]]:
        stream = engine.submit(GenerationRequest(prompt, sampling))
        return [(time.perf_counter(), token) async for chunk in stream for token in chunk.token_ids]

    async def read_all() -> list[list[tuple[float, int]]]:
        return list(await asyncio.gather(*(read(prompt) for prompt in prompts)))

    streams = asyncio.run(read_all())
    start = max(stream[0][0] for stream in streams)
    end = min(stream[-1][0] for stream in streams)
    decoded = sum(start < moment <= end for stream in streams for moment, _ in stream)
    tokens = [[token for _, token in stream] for stream in streams]
    return (decoded / (end - start) if end > start else 0.0), tokens


def run_round(
    index: int, engine: Engine, reference: Reference, prompts: Sequence[Sequence[int]], new_tokens: int
) -> Round:
    """Both sides on the same prompts; `index` decides which goes first."""
    sides: dict[str, tuple[float, list[list[int]]]] = {}
    for side in ("engine", "reference") if index % 2 == 0 else ("reference", "engine"):
        if side == "engine":
            sides[side] = engine_decode(engine, prompts, new_tokens)
        else:
            seconds, tokens = reference.decode(prompts, new_tokens)
            sides[side] = len(prompts) * new_tokens / seconds, tokens
    (ours, our_tokens), (theirs, their_tokens) = sides["engine"], sides["reference"]
    equal = sum(one == other for one, other in zip(our_tokens, their_tokens, strict=True)) / len(prompts)
    return Round(ours, theirs, equal)


def parser_of(program: str) -> argparse.ArgumentParser:
    """The flags of this measurement; what it does not know is left to `strata.config`."""
    parser = argparse.ArgumentParser(
        prog=program,
        allow_abbrev=False,
        description="Tokens a second of a batch of streams, beside batched transformers with its cache.",
        epilog=ENGINE_FLAGS_HELP,
    )
    parser.add_argument("--streams", type=int, default=8, help="requests that run together (default: 8)")
    parser.add_argument(
        "--prompt-tokens", type=int, default=128, help="tokens of every prompt (default: 128)"
    )
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens that each decodes (default: 64)")
    parser.add_argument("--pairs", "--rounds", type=int, default=7, dest="pairs", help="rounds (default: 7)")
    parser.add_argument("--seed", type=int, default=0, help="of the random prompts (default: 0)")
    parser.add_argument("--json", metavar="FILE", help=JSON_HELP)
    return parser


def main(
    arguments: Sequence[str],
    program: str = "python -m strata.bench decode",
    load: LoadModel = load_served_model,
) -> int:
    """Measures and reports. Returns 0; raises StrataError."""
    options, rest = parser_of(program).parse_known_args(arguments)
    check_least(options, (("streams", 1), ("prompt_tokens", 1), ("new_tokens", 2), ("pairs", 1)))
    check_json_path(options.json)
    with bench_config(rest, program) as config:
        served = load(config.model)
        facts = manifest(
            program,
            options.seed,
            arguments=list(arguments),
            settings=settings_of(config),
            model=served.name,
            dtype=str(served.model.dtype).removeprefix("torch."),
            torch=torch.__version__,
            torch_threads=torch.get_num_threads(),
        )
        reference = load_reference(served.model, config.model.model, from_folder=load is load_served_model)
        vocabulary = served.model.config.vocab_size
        prompts = random_prompts(vocabulary, options.streams, options.prompt_tokens, options.seed)
        with Engine(config, served) as engine, progress_steps(1 + options.pairs) as steps:
            steps.next("warming up")
            run_round(0, engine, reference, prompts, 2)
            rounds = []
            for index in range(options.pairs):
                steps.next(f"round {index + 1}")
                rounds.append(run_round(index, engine, reference, prompts, options.new_tokens))
    result = result_of(options, rounds, facts | {"reference": reference.label})
    emit(result, _tables(result), options.json)
    return 0


def result_of(options: argparse.Namespace, rounds: Sequence[Round], facts: dict[str, Any]) -> dict[str, Any]:
    """Medians, the bound, the rounds and the manifest."""
    engine = median([this.engine_tokens_per_s for this in rounds])
    reference = median([this.reference_tokens_per_s for this in rounds])
    return {
        "streams": options.streams,
        "prompt_tokens": options.prompt_tokens,
        "new_tokens": options.new_tokens,
        "engine_tokens_per_s": engine,
        "reference_tokens_per_s": reference,
        "equal_streams": median([this.equal_streams for this in rounds]),
        "bounds": [bound_of(engine, reference).as_json()],
        "rounds": [asdict(this) for this in rounds],
        "manifest": facts,
    }


def bound_of(engine: float, reference: float) -> Bound:
    """At least as fast as the reference."""
    return Bound("decode", reference / engine, 1.0, "x", "reference tokens/s / engine tokens/s")


def _tables(result: dict[str, Any]) -> list[Table]:
    rows = [
        ("engine", f"{result['engine_tokens_per_s']:.1f}"),
        (result["manifest"]["reference"], f"{result['reference_tokens_per_s']:.1f}"),
        ("streams with the reference's tokens", f"{100 * result['equal_streams']:.0f} %"),
    ]
    title = (
        f"{result['streams']} streams of {result['prompt_tokens']} + {result['new_tokens']} tokens: tokens/s"
    )
    bound = bound_of(result["engine_tokens_per_s"], result["reference_tokens_per_s"])
    return [table_of(title, ("what", "median"), rows), bounds_table([bound])]
