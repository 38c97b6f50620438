"""A plan names the size that is known to suffice, says why nothing does, and checks what it takes for granted."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tiny_plan import CYCLE_BYTES, PAGE_BYTES, flags, write_hardware, write_trace

from strata.cli.main import COMMANDS
from strata.errors import ConfigError
from strata.simulate import simulate_many
from strata.simulate.plan import (
    Grid,
    Outcome,
    Plan,
    Prices,
    Tiers,
    cheapest,
    frontier,
    monotony,
    plan,
    prices_of,
)
from strata.simulate.plan.command import UNMET, main, parser_of, question_of
from strata.simulate.plan.search import token_bytes
from strata.simulate.plan.tiers import GIB, between, rounded, sizes_of

TARGET_S = 0.2
"""Between a load of a context and computing it, which takes two seconds."""


def planned(folder: Path, *more: str) -> Plan:
    question = question_of(parser_of("strata plan").parse_args([*flags(folder), *more]))
    return plan(question, partial(simulate_many, workers=2))


def by_sizes(found: Plan) -> dict[tuple[int, int], Outcome]:
    return {(outcome.tiers.host, outcome.tiers.disk): outcome for outcome in found.outcomes}


def test_a_host_that_holds_the_cycle_meets_the_target_and_half_of_it_does_not(tmp_path: Path) -> None:
    sizes = [0, CYCLE_BYTES // 2, CYCLE_BYTES, 2 * CYCLE_BYTES]
    found = planned(tmp_path, "--ttft-p99", str(TARGET_S), "--disk", "0", "--host", ",".join(map(str, sizes)))
    outcomes = by_sizes(found)
    assert outcomes[CYCLE_BYTES, 0].meets(TARGET_S) and outcomes[CYCLE_BYTES, 0].computed < 0.05
    assert not outcomes[CYCLE_BYTES // 2, 0].meets(TARGET_S)
    assert outcomes[CYCLE_BYTES // 2, 0].computed == 1.0, "LRU over a cycle that does not fit never hits"
    assert outcomes[0, 0].ttft_p99 == pytest.approx(outcomes[CYCLE_BYTES // 2, 0].ttft_p99)
    assert found.best is not None and found.limit is None
    # The refinement stays within its resolution: it may save what the last question of a cycle takes.
    assert 0.9 * CYCLE_BYTES <= found.best.tiers.host <= CYCLE_BYTES
    assert found.best == cheapest(found.outcomes, TARGET_S)


def test_a_cheaper_disk_takes_the_place_of_host_memory(tmp_path: Path) -> None:
    host, disk = f"{CYCLE_BYTES // 2},{CYCLE_BYTES}", f"0,{2 * CYCLE_BYTES}"
    found = planned(tmp_path, "--ttft-p99", str(TARGET_S), "--host", host, "--disk", disk)
    assert found.best is not None
    assert found.best.tiers.disk > 0 and found.best.tiers.host < CYCLE_BYTES
    dear = planned(
        tmp_path,
        *("--ttft-p99", str(TARGET_S), "--host", host, "--disk", disk, "--price-per-gib", "disk=100"),
    )
    assert dear.best is not None and dear.best.tiers.disk == 0


def test_the_default_sizes_come_from_the_trace(tmp_path: Path) -> None:
    found = planned(tmp_path, "--ttft-p99", str(TARGET_S), "--requests", "200", "--max-runs", "1")
    config = found.question.config
    assert token_bytes(config, simulate_many) * 16 == PAGE_BYTES
    # The shared blocks, each request's own block, each answer; and a tenth more.
    tokens = 4 * 512 + 200 * (16 + 8)
    assert found.everything == rounded(1.1 * tokens * PAGE_BYTES / 16)
    assert found.grid.hosts[0] == 0 and found.grid.hosts[-1] == found.everything
    assert {outcome.tiers for outcome in found.outcomes} >= set(found.grid.points())


def test_what_no_memory_can_meet_is_called_computing(tmp_path: Path) -> None:
    found = planned(tmp_path, "--ttft-p99", "0.01", "--host", f"0,{CYCLE_BYTES}", "--disk", "0")
    assert found.best is None and found.limit is not None
    reason = found.limit.reason(0.01)
    assert reason.startswith("computing") and f"{found.limit.without_links.ttft_p99:.3f} s" in reason
    assert found.fastest.ttft_p99 == min(outcome.ttft_p99 for outcome in found.outcomes)


def test_sizes_that_are_too_small_are_called_that(tmp_path: Path) -> None:
    found = planned(tmp_path, "--ttft-p99", str(TARGET_S), "--host", f"0,{CYCLE_BYTES // 2}", "--disk", "0")
    assert found.best is None and found.limit is not None
    assert found.limit.reason(TARGET_S).startswith("the sizes")
    assert "add larger sizes to --host" in found.limit.reason(TARGET_S)


def test_more_load_needs_no_less(tmp_path: Path) -> None:
    sizes = ("--disk", "0", "--host", f"0,{CYCLE_BYTES}", "--requests", "200")
    slow = planned(tmp_path, "--ttft-p99", "5", *sizes)
    fast = planned(tmp_path, "--ttft-p99", "5", "--rate-scale", "4", *sizes)
    # Two seconds of computing each five seconds go without a host; two seconds each 1.25 do not.
    assert slow.best is not None and slow.best.tiers.host == 0
    assert fast.best is not None and fast.best.tiers.host > 0


def outcome(host: int, p99: float, cost: float | None = None, refused: int = 0) -> Outcome:
    tiers = Tiers(1, host, 0)
    return Outcome(tiers, float(host) if cost is None else cost, p99, p99, p99, 0.0, 0.0, 1, refused)


def test_the_frontier_rises_in_cost_and_falls_in_time() -> None:
    outcomes = [outcome(1, 9.0), outcome(2, 5.0), outcome(3, 6.0), outcome(4, 5.0), outcome(5, 1.0)]
    assert frontier(outcomes) == [outcomes[0], outcomes[1], outcomes[4]]
    assert frontier([*outcomes, outcome(0, 0.1, refused=1)]) == frontier(outcomes)
    assert cheapest(outcomes, 5.5) == outcomes[1] and cheapest(outcomes, 0.5) is None
    assert cheapest([outcome(1, 0.1, refused=1)], 0.5) is None, "who refuses is not fast"


def test_more_memory_that_is_slower_is_seen() -> None:
    checked = monotony([outcome(1, 9.0), outcome(2, 9.1), outcome(3, 12.0)])
    assert (checked.pairs, checked.worse) == (3, 2), "one in a hundred is the scheduler's noise"
    assert checked.worst == (outcome(1, 9.0), outcome(3, 12.0))
    assert monotony([outcome(1, 9.0), outcome(2, 1.0)]).worst is None


def test_sizes_half_way() -> None:
    assert between(64 * GIB, 256 * GIB, 0.1) == 128 * GIB
    assert between(0, 64 * GIB, 0.1) == 32 * GIB
    assert between(100 * GIB, 109 * GIB, 0.1) is None
    assert between(0, 1 << 20, 0.1) is None
    assert Grid((1,), (0, 5), (0, 7)).points() == [
        Tiers(1, 0, 0),
        Tiers(1, 5, 0),
        Tiers(1, 0, 7),
        Tiers(1, 5, 7),
    ]
    assert sizes_of("--host", ["2GiB,1GiB", "0"]) == (0, GIB, 2 * GIB)


def test_prices_are_assumed_or_given() -> None:
    prices = prices_of(["host=2", "device=10"], devices=4)
    assert prices.cost(Tiers(GIB, 3 * GIB, 0)) == 4 * (10 + 6)
    assert prices.sources["host"].startswith("given") and prices.sources["disk"].startswith("assumed")
    assert Prices("EUR", {"device": 0, "host": 1, "disk": 0}, {}).cost(Tiers(1, GIB, 1)) == 1


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        (["--ttft-p99", "0"], "--ttft-p99 0 is not more than 0"),
        (["--ttft-p99", "nan"], "--ttft-p99 nan"),
        (["--host", "lots"], "--host lots"),
        (["--device-memory", "0"], "--device-memory 0"),
        (["--price-per-gib", "host=-1"], "--price-per-gib host=-1"),
        (["--price-per-gib", "tape=1"], "--price-per-gib tape=1"),
        (["--price-per-gib", "host"], "--price-per-gib host: '' is no number"),
        (["--rate-scale", "0"], "--rate-scale 0"),
        (["--requests", "0"], "--requests 0"),
        (["--workers", "0"], "--workers 0"),
        (["--max-runs", "0"], "--max-runs 0"),
        (["--max-in-flight", "0"], "--max-in-flight 0"),
        (["--resolution", "0"], "--resolution 0"),
        (["--system", "sglang"], "--system 'sglang' is unknown"),
        (["--system", "no-hierarchy"], "no-hierarchy keeps nothing below the device"),
        (["--model", "llama"], "--model 'llama' is unknown"),
        (["--hardware", "abacus"], "--hardware 'abacus' is unknown"),
        (["--hardware", "none.json"], "--hardware none.json cannot be read"),
        (["--trace", "none.jsonl"], "--trace none.jsonl does not exist"),
        (["--plot", "picture.txt"], "--plot picture.txt"),
        (["--json", "no/such/folder.json"], "--json no/such/folder.json"),
        (["--device-memory", "1GiB,2GiB"], "give a price with --price-per-gib device="),
    ],
)
def test_what_cannot_be_asked_for_is_named(tmp_path: Path, more: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        question_of(parser_of("strata plan").parse_args([*flags(tmp_path), "--ttft-p99", "1", *more]))


def test_a_disk_needs_hardware_with_one(tmp_path: Path) -> None:
    path = write_hardware(tmp_path)
    hardware = json.loads(path.read_text(encoding="utf-8"))
    del hardware["disk"]
    diskless = tmp_path / "diskless.json"
    diskless.write_text(json.dumps(hardware), encoding="utf-8")
    asked = [*flags(tmp_path), "--ttft-p99", "1", "--hardware", str(diskless)]
    with pytest.raises(ConfigError, match="'diskless' has no disk"):
        question_of(parser_of("strata plan").parse_args([*asked, "--disk", "1GiB"]))
    found = plan(
        question_of(parser_of("strata plan").parse_args([*asked, "--requests", "20"])), simulate_many
    )
    assert found.grid.disks == (0,)


def test_on_the_command_line(tmp_path: Path) -> None:
    assert COMMANDS["plan"][0] == "strata.simulate.plan.command"
    sizes = ["--host", f"0,{CYCLE_BYTES}", "--disk", "0"]
    command = [sys.executable, "-m", "strata.cli.main", "plan", *flags(tmp_path), *sizes]
    picture = tmp_path / "frontier.svg"
    done = subprocess.run(
        [*command, "--ttft-p99", str(TARGET_S), "--json", "-", "--plot", str(picture)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    result: dict[str, Any] = json.loads(done.stdout)
    assert result["best"]["host_bytes"] <= CYCLE_BYTES and result["limit"] is None
    assert result["manifest"]["hardware"] == "slow" and result["prices_per_gib"]["host"]["source"]
    assert "<svg" in picture.read_text(encoding="utf-8")
    refused = subprocess.run(
        [*command, "--ttft-p99", "-1"], capture_output=True, text=True, timeout=120, check=False
    )
    assert refused.returncode == 1 and refused.stderr.startswith("error: --ttft-p99 -1")


def test_tables_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--host", f"0,{CYCLE_BYTES}", "--disk", "0", "--requests", "200"]
    assert main([*flags(tmp_path), *sizes, "--ttft-p99", "0.001", "--markdown"]) == UNMET
    shown = capsys.readouterr().out
    assert "nothing that was tried meets P99 TTFT <= 0.001 s" in shown and "| ---: |" in shown
    assert main([*flags(tmp_path), *sizes, "--ttft-p99", "5"]) == 0
    shown = capsys.readouterr().out
    assert "cheapest with P99 TTFT <= 5 s" in " ".join(shown.split()) and "assumed" in shown


def test_a_trace_of_no_requests_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = flags(tmp_path)
    write_trace(tmp_path, requests=0)
    assert main([*arguments, "--ttft-p99", "1"]) == 1
    assert "no request was found" in capsys.readouterr().err
