"""`benches/gpu_transfer.py` without a GPU: what it would measure, how it reckons, what it says, when it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from modelled_cuda import ModelledCuda

import gpu_transfer
from gpu_proof import interference, proof, tiers, verdicts
from gpu_proof.budget import Budget
from gpu_proof.interference import (
    DecodeLoop,
    Disturbed,
    LoopShape,
    PrefillLoop,
    measure_interference,
)
from gpu_proof.logits import logits_error
from gpu_proof.pools import Memory
from gpu_proof.proof import Plan, Proof, prove
from gpu_proof.rounds import Sample, interleave, median_rate, rate_ratio, time_ratio
from gpu_proof.shapes import PAGE_1, PAGE_16, QUOTAS, TOKEN_BYTES, Shape, quotas, shapes
from gpu_proof.tiers import TIERS, TierSettings, measure_tiers
from gpu_proof.transfers import Transfers, measure_transfers
from gpu_proof.verdicts import Verdict, judge_interference, judge_tiers, judge_transfers
from strata.device.cuda_runtime import DeviceError, Stream
from strata.device.fake_cuda import FakeCudaRuntime
from strata.models import ModelConfig

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
SMALL = Shape(TOKEN_BYTES, 16, layers=2)
TINY = Shape(512, 8, layers=2)
TINY_LOOP = LoopShape(
    hidden=32, inner=64, heads=4, kv_heads=2, head_dim=8, layers=2, prefill_tokens=6, decode_rows=3,
    decode_context=5, prefill_repeats=2, decode_repeats=2,
)  # fmt: skip


class Clock:
    """Goes on by itself by ``step`` at each look."""

    def __init__(self, step: float = 0.0) -> None:
        self.now = 0.0
        self._step = step

    def __call__(self) -> float:
        self.now += self._step
        return self.now


def plenty() -> Budget:
    return Budget(1e9, Clock())


# --- what is measured ----------------------------------------------------------------------------------------


def test_every_piece_page_and_quota_is_among_the_cases() -> None:
    found = shapes(quick=False)
    assert found[:2] == [PAGE_16, PAGE_1], "what verdicts are about is measured first"
    assert len(set(found)) == len(found)
    assert {shape.piece_bytes for shape in found} == {1 << power for power in range(9, 21)}
    assert {shape.page_tokens for shape in found if shape.token_bytes == TOKEN_BYTES} == {
        1 << power for power in range(10)
    }
    assert QUOTAS == quotas(quick=False) == (1, 2, 4, 8, 16, 32)
    assert PAGE_16.piece_bytes == 32 << 10 and PAGE_16.page_bytes == 2 * MIB and PAGE_1.piece_bytes == 2048
    assert set(shapes(quick=True)) < set(found) and set(quotas(quick=True)) < set(QUOTAS)
    assert {PAGE_16, PAGE_1} <= set(shapes(quick=True)) and 2 in quotas(quick=True)
    # Half of a pool's pages are moved, and host pages begin at multiples of 4 KiB without a gap.
    assert all(shape.page_bytes % 4096 == 0 and shape.pages_of(Plan().moved_bytes) >= 1 for shape in found)


def test_the_shares_of_a_plan_fit_its_time() -> None:
    for plan in (Plan(), Plan.quick(0)):
        assert sum(plan.shares_s) <= plan.total_s <= 300


# --- how it reckons ------------------------------------------------------------------------------------------


def test_rounds_take_turns_and_ratios_are_of_the_same_round() -> None:
    order: list[str] = []
    # The machine becomes slower all the time: a ratio of medians of blocks would show it, a ratio by round does not.
    pace = iter(range(1, 100))

    def way(name: str, share: float) -> Callable[[], Sample]:
        def run() -> Sample:
            order.append(name)
            return Sample(((next(pace) + 2) // 3) / share, 100)

        return run

    found = interleave({"a": way("a", 1.0), "b": way("b", 0.5), "c": way("c", 0.25)}, rounds=3, warm_ups=1)
    assert [order[turn * 3 : turn * 3 + 3] for turn in range(4)] == [
        ["c", "a", "b"], ["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"],
    ]  # fmt: skip
    assert {name: len(samples) for name, samples in found.items()} == {"a": 3, "b": 3, "c": 3}
    assert rate_ratio(found["b"], found["a"]) == pytest.approx(0.5)
    assert time_ratio(found["c"], found["a"]) == pytest.approx(4)
    assert median_rate(found["a"]) == pytest.approx(100 / 3)


def test_a_budget_shares_time_out_and_notes_what_it_refuses() -> None:
    clock = Clock()
    budget = Budget(10.0, clock)
    budget.begin(4.0)
    assert budget.left_s() == 4 and budget.allows("a", 3.9) and not budget.allows("b", 4.0)
    clock.now = 5.0
    assert not budget.allows("c") and budget.left_s() == 0
    budget.begin(8.0)
    assert budget.left_s() == 5, "no section goes past the end"
    assert budget.left_out == ["b", "c"]


@pytest.mark.parametrize("shape", [SMALL, TINY, Shape(TOKEN_BYTES, 1, layers=3)])
def test_transfers_are_held_against_one_large_copy(shape: Shape) -> None:
    runtime = ModelledCuda(kernel_share=lambda piece, blocks: {1: 0.5, 2: 0.93}[blocks])
    memory = Memory(runtime, 2 * MIB - 2 * MIB % shape.page_bytes, seed=1)
    found = measure_transfers(memory, [shape], (1, 2), 3, plenty())
    assert found.wrong_pieces == {shape: 0}
    ways = {(row.direction, row.way) for row in found.rows}
    names = ("kernel_1", "kernel_2", "pieces", "batch", "large")
    assert ways == {(direction, way) for direction in ("load", "backup") for way in names}
    for direction in ("load", "backup"):
        ratios = {way: found.ratio(shape, direction, way) for way in names}  # type: ignore[arg-type]
        assert ratios["large"] == 1
        # A call costs 1 us on this clock, so that no ratio is exactly the rates'.
        assert ratios["kernel_1"] == pytest.approx(0.5, rel=0.1)
        assert ratios["kernel_2"] == pytest.approx(0.93, rel=0.1)
        assert ratios["batch"] == pytest.approx(0.5, rel=0.1)
        assert ratios["pieces"] is not None and ratios["pieces"] < 1
    memory.close()
    assert runtime.held == 0


def test_a_wrong_piece_is_counted() -> None:
    memory = Memory(ModelledCuda(corrupts=True), MIB, seed=1)
    found = measure_transfers(memory, [SMALL], (2,), 1, plenty())
    assert found.wrong_pieces[SMALL] > 0
    assert judge_transfers(found)[2].holds is False


def test_a_runtime_without_batched_copies_is_measured_without_them() -> None:
    memory = Memory(ModelledCuda(has_batched_copies=False), MIB, seed=1)
    found = measure_transfers(memory, [SMALL], (2,), 1, plenty())
    assert {row.way for row in found.rows} == {"kernel_2", "pieces", "large"}


class Refusing(ModelledCuda):
    """Has batched copies and refuses them, as some machines do."""

    def copy_batch(self, *arguments: object) -> None:
        raise DeviceError("cannot queue 4 batched copies: CUDA error 801")


def test_batched_copies_that_are_refused_leave_the_rest_measured() -> None:
    memory = Memory(Refusing(), MIB, seed=1)
    found = measure_transfers(memory, [SMALL, TINY], (2,), 1, plenty())
    assert {row.way for row in found.rows} == {"kernel_2", "pieces", "large"}
    assert {row.piece_bytes for row in found.rows} == {SMALL.piece_bytes, TINY.piece_bytes}
    assert found.refused is not None and "CUDA error 801" in found.refused


def test_a_device_that_is_lost_while_memory_is_given_back_leaves_the_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lost(memory: Memory) -> None:
        raise DeviceError("lost", fatal=True)

    monkeypatch.setattr(Memory, "close", lost)
    found = prove(tiny_plan(0.0), ModelledCuda(), "no engine", Budget(0.0, Clock()))
    assert "lost" in found.problems["giving memory back"] and found.sections["logits"] is not None


def test_shapes_for_which_there_is_no_time_are_named() -> None:
    budget = Budget(100.0, Clock(step=1.0))
    memory = Memory(ModelledCuda(), MIB, seed=1)
    budget.begin(8.0)
    found = measure_transfers(memory, [SMALL, TINY, Shape(1024, 4, layers=2)], (2,), 1, budget)
    assert set(found.wrong_pieces) < {SMALL, TINY, Shape(1024, 4, layers=2)}
    assert "pages of 4 tokens, pieces of 4,096 bytes" in budget.left_out[-1]


@dataclass
class ModelledLoop:
    """Compute that takes as long as it is told to."""

    runtime: ModelledCuda
    seconds: float
    name: str = "prefill"

    def queue(self) -> None:
        self.runtime.compute(self.seconds)


@pytest.mark.parametrize("slowed", [1.0, 1.03, 1.2])
def test_a_loop_is_measured_alone_and_beside_transfers(
    slowed: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interference, "PAGE_16", SMALL)
    runtime = ModelledCuda(slowed=slowed)
    memory = Memory(runtime, MIB, seed=1)
    found = measure_interference(memory, [lambda: ModelledLoop(runtime, 2e-3)], 4, plenty())
    assert [(row.direction, row.blocks, row.rounds) for row in found] == [("load", 2, 4), ("backup", 1, 4)]
    for row in found:
        assert row.slowdown == pytest.approx(slowed - 1, abs=0.005)
        assert row.alone_ms == pytest.approx(2, rel=0.01)
        assert row.transfer_gb_per_s == pytest.approx(0.95 * 50, rel=0.1)


def test_transfers_that_end_too_early_are_queued_longer_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interference, "PAGE_16", SMALL)
    monkeypatch.setattr(interference, "MARGIN", 0.3)
    runtime = ModelledCuda(slowed=1.1)
    memory = Memory(runtime, MIB, seed=1)
    found = measure_interference(memory, [lambda: ModelledLoop(runtime, 2e-3)], 2, plenty())
    assert all(row.slowdown == pytest.approx(0.1, abs=0.01) for row in found)

    class Forever(ModelledCuda):
        def query(self, event: object) -> bool:
            return True

    endless = Forever()
    with pytest.raises(RuntimeError, match="nothing was disturbed"):
        measure_interference(Memory(endless, MIB, seed=1), [lambda: ModelledLoop(endless, 2e-3)], 2, plenty())


def test_the_loops_are_a_decoders_layers() -> None:
    shape = TINY_LOOP
    for make in (PrefillLoop, DecodeLoop):
        make(shape, "cpu", torch.float32).queue()
    default = LoopShape()
    assert (default.hidden, default.inner, default.heads * default.head_dim) == (4096, 14336, 4096)
    loop = PrefillLoop(shape, "cpu", torch.float64)
    query = torch.randn(6, 4, 8, dtype=torch.float64)
    key, value = (torch.randn(6, 2, 8, dtype=torch.float64) for _ in range(2))
    scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(2, 1)) / 8**0.5
    hidden = torch.ones(6, 6, dtype=torch.bool).triu(1)
    expected = torch.einsum(
        "hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), value.repeat_interleave(2, 1)
    )
    torch.testing.assert_close(loop._attend(query, key, value), expected)


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-4), (torch.bfloat16, verdicts.LOGITS)])
def test_the_tolerance_of_logits_is_one_that_this_machine_keeps(dtype: torch.dtype, most: float) -> None:
    errors = [logits_error("cpu", dtype, seed) for seed in range(3)]
    assert max(errors) < most


@pytest.mark.parametrize("cuda", [None, FakeCudaRuntime(1)], ids=["threads copy", "a fake GPU copies"])
def test_a_prompt_is_found_in_each_tier_with_its_bytes(cuda: FakeCudaRuntime | None) -> None:
    config = ModelConfig(97, 32, 64, layers=3, heads=4, kv_heads=2, head_dim=8, context_length=4096)
    settings = TierSettings(config, torch.float32, "cpu", page_size=4, tokens=64, new=9)
    found = measure_tiers(settings, 2, plenty(), cuda)
    assert found["rounds"] == 2 and found["changed_pages"] == 0
    assert set(found["ttft_ms"]) == set(TIERS) and all(value > 0 for value in found["ttft_ms"].values())
    assert found["page_bytes"] == 4 * 3 * 2 * 2 * 8 * 4
    assert found["attention"] == "plain"


def test_a_host_hit_is_held_against_the_longer_of_load_and_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelConfig(97, 32, 64, layers=3, heads=4, kv_heads=2, head_dim=8, context_length=4096)

    def small(**given: object) -> TierSettings:
        assert given == {"device": "cpu", "dtype": torch.float32, "seed": 0}
        return TierSettings(config, torch.float32, "cpu", page_size=4, tokens=64, new=9)

    monkeypatch.setattr(tiers, "TierSettings", small)
    # The load of as many bytes, by itself, takes two seconds here: longer than any compute of this model.
    monkeypatch.setattr(proof, "load_seconds", lambda runtime, size_bytes, plan: size_bytes / 12288)
    found = proof._tiers(tiny_plan(), FakeCudaRuntime(1), plenty())
    assert found["page_bytes"] * 64 // 4 == 2 * 12288
    assert found["load_ms"] == found["host_bound_ms"] == 2000 > found["ttft_ms"]["device"]
    assert [verdict.holds for verdict in judge_tiers(found)] == [True, True]


def test_a_load_alone_takes_what_the_link_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "PAGE_16", SMALL)
    runtime = ModelledCuda()
    assert proof.load_seconds(runtime, 4 * SMALL.page_bytes, tiny_plan()) == pytest.approx(
        4 * SMALL.page_bytes / (0.95 * 50e9), rel=0.2
    )
    assert runtime.held == 0


# --- what it says --------------------------------------------------------------------------------------------


def row(loop: str, direction: str, slowdown: float) -> Disturbed:
    return Disturbed(loop, direction, 2, 1.0, 1.0 + slowdown, slowdown, 40.0, 5)  # type: ignore[arg-type]


def test_verdicts_at_their_limits() -> None:
    def holds(found: list[Verdict]) -> list[bool | None]:
        return [verdict.holds for verdict in found]

    assert holds(judge_interference([row("prefill", "load", 0.01), row("prefill", "backup", 0.05)])) == [
        False, None,
    ]  # fmt: skip
    slightly = [
        row(loop, direction, 0.04) for loop in ("prefill", "decode") for direction in ("load", "backup")
    ]
    assert holds(judge_interference(slightly)) == [True, True]
    assert holds(judge_interference([row("decode", "load", 0.0)])) == [None, None], (
        "beside both, or no verdict"
    )
    tiers = {"host_bound_ms": 100.0, "ttft_ms": {"host": 110.0}, "changed_pages": 0}
    assert holds(judge_tiers(tiers)) == [True, True]
    tiers |= {"ttft_ms": {"host": 110.2}, "changed_pages": 1}
    assert holds(judge_tiers(tiers)) == [False, False]
    assert holds(judge_tiers(None, "no extension")) == [None, None]
    assert judge_tiers(None, "no extension")[0].line().endswith("(no extension)")
    assert holds(judge_transfers(None)) == [None, None, None]
    assert holds(judge_transfers(Transfers([], {}))) == [None, None, None]
    assert verdicts.at_least("x", 0.9, 0.9).holds and not verdicts.at_least("x", 0.9, 0.8999).holds
    assert verdicts.at_most("x", 1.1, 1.1).holds and not verdicts.below("x", 0.05, 0.05).holds


def tiny_plan(total_s: float = 1e9) -> Plan:
    return Plan(
        moved_bytes=2 * MIB, rounds=2, tier_rounds=1, device="cpu", dtype=torch.float32,
        shapes=(PAGE_16, PAGE_1), quotas=(1, 2), loop=TINY_LOOP, total_s=total_s, shares_s=(total_s,) * 4,
    )  # fmt: skip


def test_a_whole_proof_without_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = ModelledCuda()
    monkeypatch.setattr(
        proof,
        "measure_interference",
        lambda memory, loops, rounds, budget: measure_interference(
            memory, [partial(ModelledLoop, runtime, 1e-3, name) for name in ("prefill", "decode")], 1, budget
        ),
    )
    budget = plenty()
    found = prove(tiny_plan(), runtime, "the extension is not built", budget)
    shown = json.loads(json.dumps(found.json(budget)))
    claims = [verdict["claim"] for verdict in shown["verdicts"]]
    for part in ("16-token pages", "1-token pages", "prefill slowed", "decode slowed", "host hit"):
        assert sum(part in claim for claim in claims) == 1
    by_claim = dict(zip(claims, shown["verdicts"], strict=True))
    unmeasured = [claim for claim, verdict in by_claim.items() if verdict["holds"] is None]
    assert [by_claim[claim]["why"] for claim in unmeasured] == ["the extension is not built"] * 2
    assert all(by_claim[claim]["holds"] for claim in claims if claim not in unmeasured)
    assert len(shown["sections"]["transfers"]) == 2 * 2 * 5 and len(shown["sections"]["interference"]) == 4
    assert runtime.held == 0


def test_a_section_that_fails_is_told_and_the_rest_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(proof, "measure_transfers", fail)
    monkeypatch.setattr(proof, "_interference", fail)
    found = prove(tiny_plan(), ModelledCuda(), "no engine", plenty())
    assert found.problems["transfers"] == "RuntimeError: out of memory"
    assert [verdict.why for verdict in found.verdicts[:5]] == ["RuntimeError: out of memory"] * 5
    assert found.sections["logits"]["error"] < 1e-4
    assert "out of memory" in capsys.readouterr().err


def test_a_proof_without_time_measures_nothing_and_says_so() -> None:
    budget = Budget(0.0, Clock())
    found = prove(tiny_plan(0.0), ModelledCuda(), None, budget)
    assert len(budget.left_out) >= 4 and any("time to first token" in what for what in budget.left_out)
    assert not any(verdict.holds for verdict in found.verdicts if "logits" not in verdict.claim)


def test_the_script_writes_its_result(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = ModuleType("strata.device.cupy_runtime")
    module.CupyRuntime = ModelledCuda  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(gpu_transfer, "why_not", lambda: None)
    monkeypatch.setattr(gpu_transfer, "add_strata", lambda: "not built here")
    verdict = Verdict("a claim", 1.0, 2.0, True)

    def proved(
        plan: Plan, runtime: ModelledCuda, no_engine: str | None, budget: Budget, found: Proof
    ) -> Proof:
        assert (
            found == Proof()
            and plan == Plan.quick(7)
            and no_engine == "not built here"
            and runtime.calls == ["bind_thread"]
        )
        budget.left_out.append("a shape")
        return Proof({"transfers": []}, [verdict])

    monkeypatch.setattr(proof, "prove", proved)
    path = tmp_path / "out.json"
    assert gpu_transfer.main(["--quick", "--seed", "7", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert found["manifest"]["device"] == "a modelled GPU" and found["manifest"]["seed"] == 7
    assert {"torch", "numpy"} <= set(found["manifest"]["versions"]) and len(
        found["manifest"]["kernels"]
    ) == 64
    assert found["verdicts"] == [verdict.json()] and found["left_out"] == ["a shape"]
    shown = capsys.readouterr().err
    assert "holds  a claim: 2" in shown and "left out  a shape" in shown
    verdict = Verdict("a claim", 1.0, None, None)
    assert gpu_transfer.main(["--quick", "--seed", "7"]) == 1
    assert json.loads(capsys.readouterr().out)["verdicts"][0]["holds"] is None


SILENT = """
import sys, threading
from types import ModuleType
sys.path[:0] = {path!r}
from modelled_cuda import ModelledCuda
import gpu_transfer
from gpu_proof import proof
from gpu_proof.proof import Plan
module = ModuleType("strata.device.cupy_runtime")
module.CupyRuntime = ModelledCuda
sys.modules[module.__name__] = module
gpu_transfer.why_not = lambda: None
gpu_transfer.GRACE_S = 0.2
Plan.quick = lambda seed: Plan(total_s=0.1)

def silent(plan, runtime, no_engine, budget, found):
    found.sections["transfers"] = ["a row"]
    threading.Event().wait()

proof.prove = silent
sys.exit(gpu_transfer.main(["--quick"]))
"""


def test_a_silent_device_does_not_keep_the_script_from_ending() -> None:
    path = [str(ROOT / "benches"), str(ROOT / "tests" / "bench"), str(ROOT / "python")]
    done = run("-c", SILENT.format(path=path))
    assert done.returncode == 1 and "did not answer within 0.3 s" in done.stderr
    found = json.loads(done.stdout)
    assert found["sections"]["transfers"] == ["a row"] and "time" in found["problems"]


# --- where it cannot run -------------------------------------------------------------------------------------


def run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_WAIT_POLICY": "PASSIVE"}
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=False, timeout=120, env=environment
    )


def test_without_a_gpu_the_script_says_so_in_a_sentence() -> None:
    done = run(str(ROOT / "benches" / "gpu_transfer.py"), "--quick")
    assert done.returncode == 2
    assert done.stdout == "" and len(done.stderr.splitlines()) == 1
    assert "there is no GPU here" in done.stderr and "docs/GPU.md" in done.stderr


WITHOUT = """
import sys
sys.path.insert(0, {benches!r})
for name in {missing!r}:
    sys.modules[name] = None
from gpu_proof.checkout import add_strata
print(add_strata())
"""


def test_transfers_need_neither_the_extension_nor_what_reads_models() -> None:
    missing = [
        "strata._core",
        "safetensors",
        "tokenizers",
        "gguf",
        "jinja2",
        "huggingface_hub",
        "fastapi",
        "rich",
    ]
    code = WITHOUT.format(benches=str(ROOT / "benches"), missing=missing)
    parts = "import torch, gpu_proof.proof, gpu_proof.manifest, strata.device.cuda_runtime"
    error = "from gpu_proof.logits import logits_error\nprint(logits_error('cpu', torch.float32, 0) < 1e-4)"
    done = run("-c", f"{code}\n{parts}\n{error}")
    assert done.returncode == 0, done.stderr
    why, right = done.stdout.splitlines()
    assert "extension is not built" in why and "maturin develop --release" in why and right == "True"


def test_the_engine_needs_nothing_that_reads_models() -> None:
    missing = ["safetensors", "tokenizers", "gguf", "jinja2", "huggingface_hub", "fastapi", "rich"]
    code = WITHOUT.format(benches=str(ROOT / "benches"), missing=missing)
    done = run("-c", f"{code}\nimport gpu_proof.tiers")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "None\n"


def test_streams_are_plain_numbers() -> None:
    """What the modelled runtime relies on, as the real one does."""
    assert Stream(3) == 3
