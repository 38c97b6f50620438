"""Memory stays within weights + device pool + host cap + 1 GiB, and the disk root within its cap."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CHILD = """
import json, random, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import torch
torch.set_num_threads(1)
from engine_harness import Sizes, engine_of, tiny_served, wait_idle
from pressure import Load, run_clients
from strata._core import disk_usage

def resident():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024

root, seconds = Path(sys.argv[2]), float(sys.argv[3])
served = tiny_served()
sizes = Sizes(16, 1000, 2000, 32 << 20)
engine = engine_of(root, sizes, served)
pools = sum(report.capacity_bytes for report in engine.tiers()[:2])
first = most = disk = rounds = 0
deadline = time.monotonic() + seconds
while time.monotonic() < deadline:
    load = Load(rounds, clients=32, documents=20, document_tokens=(100, 600), turns=3)
    outcome = run_clients(engine, served.model, load, verify=False)
    assert not (outcome.wrong or outcome.errors or outcome.stuck), outcome
    most, disk, rounds = max(most, resident()), max(disk, disk_usage(root)), rounds + 1
    first = first or most
wait_idle(engine)
engine.shutdown(0.0, 0.0)
print(json.dumps({"pools": pools, "first": first, "most": most, "disk": disk, "rounds": rounds}))
"""
"""A process of its own: other tests' memory must not count."""


def run(root: Path, seconds: float) -> dict[str, int]:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(Path(__file__).parent), str(root), str(seconds)],
        capture_output=True,
        text=True,
        timeout=seconds + 120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def assert_bounded(found: dict[str, int]) -> None:
    assert found["rounds"] > 1
    assert found["most"] <= found["pools"] + (1 << 30), found
    # A leak shows as growth after the first round, when pools and libraries are there.
    assert found["most"] <= found["first"] + (64 << 20), found
    assert found["disk"] <= 32 << 20, found


def test_memory_of_a_short_run(tmp_path: Path) -> None:
    assert_bounded(run(tmp_path / "kv", 10.0))


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_memory_of_ten_minutes(tmp_path: Path) -> None:
    assert_bounded(run(tmp_path / "kv", 600.0))
