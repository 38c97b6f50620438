"""`bench models`: memory and speed of models of published shapes on this machine, with random weights.

Each size is measured in a process of its own, so that its memory is its own: weights in memory, KV cache of a token,
tokens a second of one prompt in chunks, and of one stream that decodes behind it. No engine is around the model: what
is measured is what every engine has to wait for. The fastest of several rounds counts, and the fastest decode step:
whatever else runs on the machine only makes them slower.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.table import Table

from strata.bench.model_shapes import SHAPES, shape_of
from strata.bench.reference import BarePool
from strata.bench.report import JSON_HELP, check_json_path, emit, progress_steps, table_of
from strata.bench.settings import check_least, manifest
from strata.config.machine import available_memory
from strata.errors import CapacityError, ConfigError
from strata.models import DTYPES, CausalLM, ModelConfig
from strata.models.weights import expected_shapes

_CHUNK = 512
_SPARE = 1.15
"""Memory that a model takes while it is loaded, as a multiple of its weights, beside its largest tensor."""
_BLOCK = 1_000_003
"""Random numbers that weights repeat; a prime, so that no two rows of a matrix are the same."""
_LIMIT_S = 900.0
GIB = 1 << 30


@dataclass(frozen=True)
class Measured:
    """One size. Bytes, and tokens a second; ``resident_bytes`` is the process with weights and one prompt's KV."""

    name: str
    dtype: str
    parameters: int
    weight_bytes: int
    kv_bytes_per_token: int
    resident_bytes: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float


def main(arguments: Sequence[str], program: str = "python -m strata.bench models") -> int:
    """Measures and reports. Returns 0; raises StrataError."""
    options = _parser(program).parse_args(arguments)
    check_least(options, (("prompt_tokens", 2), ("new_tokens", 1), ("rounds", 1), ("threads", 0)))
    check_json_path(options.json)
    sizes = options.size or list(SHAPES)
    if options.threads:
        torch.set_num_threads(options.threads)
    rows, left_out = [], {}
    with progress_steps(len(sizes)) as steps:
        for name in sizes:
            steps.next(name)
            missing = memory_missing(shape_of(name), DTYPES[options.dtype], options.prompt_tokens)
            if missing is not None:
                left_out[name] = missing
            elif len(sizes) == 1:
                rows.append(measure(name, shape_of(name), options))
            else:
                rows.append(_measured_apart(name, options, program))
    if not rows:
        raise CapacityError("; ".join(f"{name}: {why}" for name, why in left_out.items()))
    result = {
        "prompt_tokens": options.prompt_tokens,
        "new_tokens": options.new_tokens,
        "models": [asdict(row) for row in rows],
        "left_out": left_out,
        "manifest": manifest(
            program, 0, arguments=list(arguments), torch=torch.__version__, threads=torch.get_num_threads()
        ),
    }
    emit(result, [_table(rows, options)], options.json)
    return 0


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program,
        allow_abbrev=False,
        description="Memory and speed of models of published shapes on this machine, with random weights.",
    )
    parser.add_argument(
        "--size",
        action="append",
        choices=list(SHAPES),
        help="a model to measure; may be given several times (default: all for which there is memory)",
    )
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32", help="default: %(default)s")
    parser.add_argument("--prompt-tokens", type=int, default=512, help="default: %(default)s")
    parser.add_argument("--new-tokens", type=int, default=16, help="tokens to decode (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="prefills (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=0, help="threads that compute; 0: torch's choice")
    parser.add_argument("--json", metavar="FILE", help=JSON_HELP)
    return parser


def memory_missing(config: ModelConfig, dtype: torch.dtype, tokens: int) -> str | None:
    """Why a model cannot be measured in the memory that is left; None if it can."""
    elements = [math.prod(shape) for shape in expected_shapes(config).values()]
    needed = (
        sum(elements) * _SPARE + 2 * max(elements) + config.kv_elements_per_token * tokens
    ) * dtype.itemsize
    left = available_memory()
    if needed <= left:
        return None
    return f"needs about {needed / GIB:.1f} GiB of memory, {left / GIB:.1f} GiB are left"


def _measured_apart(name: str, options: argparse.Namespace, program: str) -> Measured:
    """`measure` in a process of its own. Raises ConfigError if that fails."""
    command = [sys.executable, "-m", "strata.bench", "models", "--size", name, "--json", "-"]
    command += ["--dtype", options.dtype, "--threads", str(options.threads), "--rounds", str(options.rounds)]
    command += ["--prompt-tokens", str(options.prompt_tokens), "--new-tokens", str(options.new_tokens)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"{name} took more than {_LIMIT_S:g} s: name smaller models with --size, or give fewer --prompt-tokens"
        ) from error
    if done.returncode != 0:
        reason = "\n".join(done.stderr.strip().splitlines()[-3:])
        raise ConfigError(f"{program} --size {name} ended with code {done.returncode}: {reason}")
    return Measured(**json.loads(done.stdout)["models"][0])


class TiledWeights:
    """`Weights` of any size without the minutes that drawing them takes: one block of random numbers, repeated. What a
    forward costs does not depend on them."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self._shapes = expected_shapes(config)
        self._block = torch.randn(_BLOCK, generator=torch.Generator().manual_seed(0)).to(dtype)

    def get(self, name: str) -> torch.Tensor:
        """One tensor; norms are one, all else is of a size that keeps activations from growing."""
        shape = self._shapes[name]
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=self._block.dtype)
        elements = math.prod(shape)
        tiled = self._block.repeat(-(-elements // _BLOCK))[:elements]
        return tiled.mul_(shape[-1] ** -0.5).view(shape)


def measure(name: str, config: ModelConfig, options: argparse.Namespace) -> Measured:
    """One model, in this process."""
    dtype = DTYPES[options.dtype]
    model = CausalLM(config, TiledWeights(config, dtype))
    pool = BarePool(model, options.prompt_tokens + options.new_tokens, 1)
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(0, config.vocab_size, (options.prompt_tokens,), generator=generator).tolist()
    # The first forward of a process also sets torch up.
    pool.forward([prompt[:2]], 0)
    rounds = []
    for _ in range(options.rounds):
        began = time.perf_counter()
        for start in range(0, len(prompt), _CHUNK):
            token = int(pool.forward([prompt[start : start + _CHUNK]], start).argmax())
        rounds.append(time.perf_counter() - began)
    steps = []
    for step in range(options.new_tokens):
        began = time.perf_counter()
        token = int(pool.forward([[token]], len(prompt) + step).argmax())
        steps.append(time.perf_counter() - began)
    parameters = sum(math.prod(shape) for shape in expected_shapes(config).values())
    return Measured(
        name,
        options.dtype,
        parameters,
        parameters * dtype.itemsize,
        config.kv_elements_per_token * dtype.itemsize,
        resident_bytes(),
        len(prompt) / min(rounds),
        1 / min(steps),
    )


def resident_bytes() -> int:
    """Memory that this process holds, in bytes."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


def _table(rows: Sequence[Measured], options: argparse.Namespace) -> Table:
    cells = [
        (
            row.name,
            f"{row.parameters / 1e6:,.0f} M",
            f"{row.weight_bytes / GIB:.2f} GiB",
            f"{row.resident_bytes / GIB:.2f} GiB",
            f"{row.kv_bytes_per_token / 1024:.1f} KiB",
            f"{row.prefill_tokens_per_s:.1f}",
            f"{row.decode_tokens_per_s:.2f}",
        )
        for row in rows
    ]
    title = f"{options.dtype}, a prompt of {options.prompt_tokens} tokens, then one stream"
    columns = (
        "model",
        "parameters",
        "weights",
        "process",
        "KV a token",
        "prefill tokens/s",
        "decode tokens/s",
    )
    return table_of(title, columns, cells)
