"""The whole proof: sections in order, each within its share of the time; what fails is told and stops nothing else."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from gpu_proof.budget import Budget
from gpu_proof.interference import DecodeLoop, LoopShape, PrefillLoop, measure_interference
from gpu_proof.pools import Memory
from gpu_proof.shapes import PAGE_16, Shape, quotas, shapes
from gpu_proof.transfers import measure_transfers
from gpu_proof.verdicts import Verdict, judge_interference, judge_logits, judge_tiers, judge_transfers
from strata.device.cuda_runtime import CudaRuntime
from strata.device.kernels import LOAD_BLOCKS

Found = TypeVar("Found")
GIB = 1 << 30


@dataclass(frozen=True)
class Plan:
    """How much is measured. ``shares_s``: seconds of transfers, interference, logits and tiers."""

    moved_bytes: int = GIB // 4
    rounds: int = 5
    tier_rounds: int = 5
    seed: int = 0
    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    shapes: tuple[Shape, ...] = tuple(shapes(quick=False))
    quotas: tuple[int, ...] = quotas(quick=False)
    loop: LoopShape = field(default_factory=LoopShape)
    total_s: float = 285.0
    shares_s: tuple[float, float, float, float] = (100.0, 40.0, 30.0, 115.0)

    @classmethod
    def quick(cls, seed: int) -> Plan:
        """A look at everything in about a minute and a half."""
        return cls(
            moved_bytes=GIB // 8,
            rounds=3,
            tier_rounds=2,
            seed=seed,
            shapes=tuple(shapes(quick=True)),
            quotas=quotas(quick=True),
            loop=LoopShape(prefill_repeats=4, decode_repeats=15),
            total_s=120.0,
            shares_s=(20.0, 20.0, 20.0, 60.0),
        )


@dataclass
class Proof:
    """What was found. `json` is the result without its manifest."""

    sections: dict[str, Any] = field(default_factory=dict)
    verdicts: list[Verdict] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)

    def json(self, budget: Budget) -> dict[str, Any]:
        """Verdicts first."""
        return {
            "verdicts": [verdict.json() for verdict in self.verdicts],
            "problems": self.problems,
            "left_out": budget.left_out,
            "sections": self.sections,
        }


def prove(
    plan: Plan, runtime: CudaRuntime, no_engine: str | None, budget: Budget, proof: Proof | None = None
) -> Proof:
    """Runs all sections. ``no_engine`` says why the engine's section cannot run, or is None. What is found goes into
    ``proof`` as it is found."""
    proof = Proof() if proof is None else proof
    transfers_s, interference_s, logits_s, tiers_s = plan.shares_s

    budget.begin(transfers_s)
    memory = _section(proof, "memory", lambda: Memory(runtime, plan.moved_bytes, plan.seed))
    transfers, disturbed = None, None
    if memory is not None:
        transfers = _section(
            proof,
            "transfers",
            lambda: measure_transfers(memory, list(plan.shapes), plan.quotas, plan.rounds, budget),
        )
        budget.begin(interference_s)
        disturbed = _section(proof, "interference", lambda: _interference(plan, memory, budget))
        _section(proof, "giving memory back", memory.close)
    if transfers is not None and transfers.refused is not None:
        proof.problems["batch"] = transfers.refused
    proof.sections["transfers"] = [row.json() for row in transfers.rows] if transfers else []
    proof.sections["interference"] = [row.json() for row in disturbed or []]
    proof.verdicts += judge_transfers(transfers, _why(proof, "memory", "transfers"))
    proof.verdicts += judge_interference(disturbed or [], _why(proof, "memory", "interference"))

    budget.begin(logits_s)
    error = _section(proof, "logits", lambda: _logits(plan))
    proof.sections["logits"] = {"error": error}
    proof.verdicts += judge_logits(error, _why(proof, "logits"))

    budget.begin(tiers_s)
    tiers = None
    if no_engine is not None:
        proof.problems["tiers"] = no_engine
    elif budget.allows("time to first token by tier"):
        tiers = _section(proof, "tiers", lambda: _tiers(plan, runtime, budget))
    proof.sections["tiers"] = tiers
    proof.verdicts += judge_tiers(tiers, _why(proof, "tiers"))
    return proof


def _interference(plan: Plan, memory: Memory, budget: Budget) -> list[Any]:
    loops: list[Callable[[], Any]] = [
        lambda: PrefillLoop(plan.loop, plan.device, plan.dtype),
        lambda: DecodeLoop(plan.loop, plan.device, plan.dtype),
    ]
    return measure_interference(memory, loops, 2 * plan.rounds, budget)


def _logits(plan: Plan) -> float:
    # Imported late: whatever of the model's needs is missing, the transfers are measured.
    from gpu_proof.logits import logits_error  # noqa: PLC0415

    return logits_error(plan.device, plan.dtype, plan.seed)


def _tiers(plan: Plan, runtime: CudaRuntime, budget: Budget) -> dict[str, Any]:
    from gpu_proof.tiers import TierSettings, measure_tiers  # noqa: PLC0415

    settings = TierSettings(device=plan.device, dtype=plan.dtype, seed=plan.seed)
    found = measure_tiers(settings, plan.tier_rounds, budget, runtime)
    if plan.device == "cuda":
        # torch keeps what the model had; the load wants two times its pages beside that.
        torch.cuda.empty_cache()
    load = load_seconds(runtime, found["page_bytes"] * found["tokens"] // settings.page_size, plan)
    found["load_ms"] = load * 1e3
    # With the context on the device, what is left of the time to the first token is compute.
    found["host_bound_ms"] = max(found["load_ms"], found["ttft_ms"]["device"])
    return found


def load_seconds(runtime: CudaRuntime, size_bytes: int, plan: Plan) -> float:
    """What a load of so many bytes takes alone, as 16-token pages of Llama-8B and with a load's blocks; the median."""
    memory = Memory(runtime, size_bytes, plan.seed)
    load = memory.pair(PAGE_16).kernels("load", LOAD_BLOCKS)
    load()
    seconds = sorted(load().seconds for _ in range(plan.rounds))[plan.rounds // 2]
    memory.close()
    return seconds


def _section(proof: Proof, name: str, run: Callable[[], Found]) -> Found | None:
    """What ``run`` gives; None, and a problem that says why, if it fails."""
    try:
        return run()
    except Exception as error:  # noqa: BLE001 - one section's failure must not lose the others' results
        traceback.print_exc(file=sys.stderr)
        proof.problems[name] = f"{type(error).__name__}: {error}"
        return None


def _why(proof: Proof, *names: str) -> str:
    """The first problem of some sections, for verdicts that lack a measurement."""
    return next((proof.problems[name] for name in names if name in proof.problems), "")
