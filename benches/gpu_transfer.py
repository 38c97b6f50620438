"""What only a GPU can prove, in one script of five minutes: python benches/gpu_transfer.py --json out.json [--quick]

It needs an NVIDIA GPU with 40 GiB of free memory (the model's; the transfers take 1), 16 GiB of host memory, a copy of
this repository, Python 3.10 or newer with torch (2.10 or newer for a fast attention), CuPy (cupy-cuda13x) and NumPy,
and no network. The kernels are compiled by CuPy when they are first used, or taken from `make cubins`.

The engine's part needs Strata's extension, python/strata/_core.abi3.so. It works on every Linux of the same processor
and Python from 3.10 on, so a copy of a tree in which `make setup` was run brings it along; with Rust on the machine,

    pip install maturin && maturin develop --release

Without it everything else runs, and the result says what was left out. Exit code: 0 if all that must hold holds, 1 if
something does not or was not measured, 2 if there is no GPU to measure on. docs/GPU.md says how to read the result.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from gpu_proof.checkout import add_strata

NO_GPU = 2
HOW = "see docs/GPU.md for what this script needs"
GRACE_S = 45.0
"""What may be underway when the time is up may take so long; after that the device is taken to be silent."""


def why_not() -> str | None:
    """One sentence if this machine has nothing to measure, else None."""
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        return f"there is no torch here ({error}); {HOW}"
    if not torch.cuda.is_available():
        return f"there is no GPU here (torch {torch.__version__} sees none); {HOW}"
    try:
        importlib.import_module("cupy")
    except ImportError as error:
        return f"there is a GPU, but no CuPy ({error}): pip install cupy-cuda13x; {HOW}"
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the proof; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="file for the result; without it, it goes to stdout")
    parser.add_argument("--quick", action="store_true", help="fewer shapes and rounds, about two minutes")
    parser.add_argument("--seed", type=int, default=0, help="of pages, weights and prompts")
    flags = parser.parse_args(argv)
    problem = why_not()
    if problem is not None:
        print(f"gpu_transfer: {problem}", file=sys.stderr)
        return NO_GPU
    no_engine = add_strata()
    # Imported once `strata` can be: the checkout need not be installed.
    from gpu_proof.budget import Budget  # noqa: PLC0415
    from gpu_proof.manifest import manifest  # noqa: PLC0415
    from gpu_proof.proof import Plan, Proof, prove  # noqa: PLC0415
    from strata.device.cupy_runtime import CupyRuntime  # noqa: PLC0415
    from strata.errors import StrataError  # noqa: PLC0415

    plan = Plan.quick(flags.seed) if flags.quick else Plan(seed=flags.seed)
    budget = Budget(plan.total_s)
    try:
        runtime = CupyRuntime()
        runtime.bind_thread()
    except StrataError as error:
        print(f"gpu_transfer: {error}; {HOW}", file=sys.stderr)
        return 1
    described = manifest(runtime.describe(), flags.seed, {"quick": flags.quick})
    found = Proof()

    def write() -> None:
        text = json.dumps({"manifest": described, **found.json(budget)}, indent=1)
        if flags.json is None:
            print(text, flush=True)
        else:
            flags.json.write_text(text + "\n", encoding="utf-8")

    def give_up() -> None:
        found.problems["time"] = f"the device did not answer within {plan.total_s + GRACE_S:g} s"
        write()
        print(f"gpu_transfer: {found.problems['time']}; what was found by then is written", file=sys.stderr)

    watchdog = ends_with(plan.total_s + GRACE_S, give_up)
    found = prove(plan, runtime, no_engine, budget, found)
    watchdog.cancel()
    write()
    for verdict in found.verdicts:
        print(verdict.line(), file=sys.stderr)
    for what in budget.left_out:
        print(f"{'left out':>12}  {what}", file=sys.stderr)
    return 0 if found.verdicts and all(verdict.holds for verdict in found.verdicts) else 1


def ends_with(limit_s: float, last_words: Callable[[], None]) -> threading.Timer:
    """Ends the process with code 1 after ``limit_s`` seconds, unless it is cancelled: a device that falls silent holds
    a thread for good."""

    def end() -> None:
        try:
            last_words()
        finally:
            os._exit(1)

    timer = threading.Timer(limit_s, end)
    timer.daemon = True
    timer.start()
    return timer


if __name__ == "__main__":
    sys.exit(main())
