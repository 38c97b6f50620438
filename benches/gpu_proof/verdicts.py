"""What must hold on a GPU, one line each: the claim, what was measured, and whether it holds. What could not be
measured holds for nobody."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gpu_proof.interference import Disturbed
from gpu_proof.shapes import PAGE_1, PAGE_16
from gpu_proof.transfers import Transfers
from strata.device.kernels import LOAD_BLOCKS

LOAD_AT_PAGE_16 = 0.9
LOAD_AT_PAGE_1 = 0.75
PREFILL_SLOWED = 0.05
DECODE_SLOWED = 0.10
HOST_HIT = 1.1
LOGITS = 0.1


@dataclass(frozen=True)
class Verdict:
    """``holds`` is None where nothing was measured; ``why`` then says why not."""

    claim: str
    limit: float
    measured: float | None
    holds: bool | None
    why: str = ""

    def json(self) -> dict[str, Any]:
        """As it stands in the result."""
        return asdict(self)

    def line(self) -> str:
        """For people."""
        mark = {True: "holds", False: "FAILS", None: "not measured"}[self.holds]
        found = "" if self.measured is None else f": {self.measured:.4g}"
        return f"{mark:>12}  {self.claim}{found}" + (f" ({self.why})" if self.why else "")


def at_least(claim: str, limit: float, measured: float | None, why: str = "") -> Verdict:
    """Holds if the measured value reaches the limit."""
    return Verdict(claim, limit, measured, None if measured is None else measured >= limit, why)


def at_most(claim: str, limit: float, measured: float | None, why: str = "") -> Verdict:
    """Holds if the measured value stays within the limit."""
    return Verdict(claim, limit, measured, None if measured is None else measured <= limit, why)


def below(claim: str, limit: float, measured: float | None, why: str = "") -> Verdict:
    """Holds if the measured value stays under the limit."""
    return Verdict(claim, limit, measured, None if measured is None else measured < limit, why)


def judge_transfers(transfers: Transfers | None, why: str = "") -> list[Verdict]:
    """Bandwidth and bytes."""
    way = f"kernel_{LOAD_BLOCKS}"
    at_16 = transfers.ratio(PAGE_16, "load", way) if transfers else None
    at_1 = transfers.ratio(PAGE_1, "load", way) if transfers else None
    wrong = sum(transfers.wrong_pieces.values()) if transfers and transfers.wrong_pieces else None
    return [
        at_least(f"load of 16-token pages of Llama-8B with {LOAD_BLOCKS} blocks, share of one large copy",
                 LOAD_AT_PAGE_16, at_16, why),
        at_least(f"load of 1-token pages (2 KiB pieces) with {LOAD_BLOCKS} blocks, share of one large copy",
                 LOAD_AT_PAGE_1, at_1, why),
        at_most("pieces whose bytes differ after a load and a backup", 0, wrong, why),
    ]  # fmt: skip


def judge_interference(found: Sequence[Disturbed], why: str = "") -> list[Verdict]:
    """The worse of a load and a backup, for each loop that was measured beside both."""
    verdicts = []
    for loop, limit in (("prefill", PREFILL_SLOWED), ("decode", DECODE_SLOWED)):
        slowdowns = {row.direction: row.slowdown for row in found if row.loop == loop}
        worst = max(slowdowns.values()) if len(slowdowns) == 2 else None
        claim = f"{loop} slowed by a load or a backup beside it, share of its time alone"
        verdicts.append(below(claim, limit, worst, why))
    return verdicts


def judge_tiers(tiers: dict[str, Any] | None, why: str = "") -> list[Verdict]:
    """Time to the first token of a host hit, bytes of pages, and tokens."""
    tiers = tiers or {}
    bound = tiers.get("host_bound_ms")
    host = tiers.get("ttft_ms", {}).get("host")
    ratio = host / bound if host is not None and bound else None
    return [
        at_most("host hit, as a multiple of the longer of load and compute", HOST_HIT, ratio, why),
        at_most("pages whose bytes changed on their way through host and disk", 0, tiers.get("changed_pages"), why),
    ]  # fmt: skip


def judge_logits(error: float | None, why: str = "") -> list[Verdict]:
    """bfloat16 on the GPU against float32 on the CPU."""
    claim = "logits in bfloat16 on the GPU, error as a share of the float32 reference's norm"
    return [at_most(claim, LOGITS, error, why)]
