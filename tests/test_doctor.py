"""`strata doctor`: findings and flags as a function of facts, and one real look at this machine."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from strata._core import probe_io_uring
from strata.cli import main as command_line
from strata.cli.doctor import OK, UNAVAILABLE, WARNING, Finding, examine, main, serve_command, suggest
from strata.cli.machine_facts import DiskFacts, GpuFacts, MachineFacts, filesystem_of, look_at_disk
from strata.config import parse_size, read_config
from strata.config.machine import cpu_limit, memory_limit

GIB = 1 << 30
DISK = DiskFacts(Path("/data"), Path("/data/strata-kv"), "ext4", 80 * GIB, None, None, 1e9, 8e8)
GPU = GpuFacts("580", ("H200 (sm_90, 139 GiB)",), None, None, "14.2.0", ("sm_80", "sm_90"))
NO_GPU = GpuFacts(None, (), "CPU build", "missing")
GOOD = MachineFacts(
    io_uring_refusal=None,
    memlock=None,
    transparent_huge_pages="madvise",
    reserved_huge_pages=0,
    physical_memory=64 * GIB,
    memory_limit=None,
    available_memory=32 * GIB,
    physical_cores=16,
    usable_cores=16,
    cpu_limit=None,
    copy_rate=9e9,
    disk=DISK,
    gpu=GPU,
)
CPU_ONLY = replace(GOOD, gpu=NO_GPU)


def found(facts: MachineFacts, name: str) -> Finding:
    return {finding.name: finding for finding in examine(facts)}[name]


def flags(facts: MachineFacts) -> dict[str, str]:
    return {suggestion.flag: suggestion.value for suggestion in suggest(facts)}


def test_a_good_machine_needs_no_remedy() -> None:
    assert [finding.status for finding in examine(GOOD)] == [OK] * 10
    assert not any(finding.remedy for finding in examine(GOOD))


def test_a_gpu_gets_no_flag_that_it_refuses() -> None:
    assert flags(GOOD) == {
        "--device": "cuda",
        "--host-memory": "16GiB",
        "--disk-path": "/data/strata-kv",
        "--disk-capacity": "20GiB",
    }
    assert "H200" in suggest(GOOD)[0].reason


@pytest.mark.parametrize(
    "gpu", [NO_GPU, replace(GPU, cupy_refusal="missing"), replace(GPU, cuda_refusal="no NVRTC")]
)
def test_a_machine_whose_gpu_does_not_serve_gets_the_cpus_flags(gpu: GpuFacts) -> None:
    assert flags(replace(GOOD, gpu=gpu)) == {
        "--device-memory": "8GiB",
        "--host-memory": "8GiB",
        "--copy-threads": "2",
        "--disk-path": "/data/strata-kv",
        "--disk-capacity": "20GiB",
    }


@pytest.mark.parametrize(
    ("facts", "name", "status", "words"),
    [
        (replace(GOOD, io_uring_refusal="Operation not permitted"), "io_uring", UNAVAILABLE, "seccomp"),
        (replace(GOOD, transparent_huge_pages="never"), "huge pages", WARNING, "madvise"),
        (replace(GOOD, transparent_huge_pages=""), "huge pages", WARNING, "not in this kernel"),
        (replace(GOOD, memlock=8 << 20), "locked memory", WARNING, "ulimit -l"),
        (replace(GOOD, cpu_limit=1.5), "cores", WARNING, "--threads 1"),
        (replace(GOOD, available_memory=512 << 20), "memory", UNAVAILABLE, "1 GiB is the least"),
        (replace(GOOD, disk=replace(DISK, filesystem="tmpfs")), "disk folder", WARNING, "restart"),
        (replace(GOOD, disk=replace(DISK, filesystem="overlay")), "disk folder", WARNING, "volume"),
        (replace(GOOD, disk=replace(DISK, write_refusal="Read-only")), "disk folder", UNAVAILABLE, "--dir"),
        (replace(GOOD, disk=replace(DISK, write_refusal="Read-only")), "O_DIRECT", UNAVAILABLE, "not tried"),
        (replace(GOOD, disk=replace(DISK, direct_refusal="Invalid argument")), "O_DIRECT", WARNING, "cache"),
        (replace(GOOD, disk=replace(DISK, read_rate=5e6)), "disk speed", WARNING, "5 MB/s"),
        (replace(GOOD, disk=replace(DISK, read_rate=None)), "disk speed", UNAVAILABLE, "not measured"),
        (replace(GOOD, gpu=NO_GPU), "GPU", UNAVAILABLE, "none is needed"),
        (replace(GOOD, gpu=GpuFacts("580", (), "CPU build", "missing")), "GPU", WARNING, "CPU build"),
        (replace(GOOD, gpu=GpuFacts("580", ("H200",), None, "missing")), "GPU", WARNING, "strata-kv[cuda]"),
        (
            replace(GOOD, gpu=replace(GPU, cuda_refusal="no NVRTC")),
            "GPU",
            WARNING,
            "--device cuda does not start: no",
        ),
        (
            replace(GOOD, gpu=GpuFacts(None, (), "", "", cubins_refusal="stale")),
            "GPU",
            WARNING,
            "make cubins",
        ),
    ],
)
def test_each_lack_is_told_with_a_remedy(facts: MachineFacts, name: str, status: str, words: str) -> None:
    finding = found(facts, name)
    assert finding.status == status
    assert finding.remedy and words in f"{finding.detail} {finding.remedy}"


def test_limits_below_the_machine_decide_the_flags() -> None:
    small = replace(CPU_ONLY, memory_limit=2 * GIB, available_memory=3 * GIB // 2, usable_cores=2)
    assert "2 GiB" in found(small, "memory").detail
    assert flags(small)["--device-memory"] == "256MiB"
    assert flags(small)["--copy-threads"] == "1"
    assert flags(replace(CPU_ONLY, cpu_limit=2.0))["--copy-threads"] == "1"
    assert flags(replace(CPU_ONLY, available_memory=100 << 20))["--host-memory"] == "25MiB"


def test_a_folder_that_cannot_hold_a_disk_tier_turns_it_off() -> None:
    for disk in (replace(DISK, write_refusal="Permission denied"), replace(DISK, filesystem="tmpfs")):
        chosen = flags(replace(GOOD, disk=disk))
        assert chosen["--disk-capacity"] == "0" and "--disk-path" not in chosen


def test_the_command_at_the_end_starts_a_server_from_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert serve_command(".venv/bin/strata") == ".venv/bin/strata serve"
    assert serve_command("python/strata/cli/doctor.py") == f"{shlex.quote(sys.executable)} -m strata.serve"
    program = tmp_path / "strata"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert serve_command(".venv/bin/strata") == "strata serve"


def test_only_what_is_needed_fails_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    poor = replace(
        GOOD, io_uring_refusal="no", disk=replace(DISK, direct_refusal="no"), gpu=GpuFacts(None, (), "", "")
    )
    assert main([], look=lambda _folder: poor) == 0
    assert f"{serve_command(sys.argv[0])} --device-memory 8GiB" in capsys.readouterr().out
    assert main([], look=lambda _folder: replace(GOOD, available_memory=1 << 20)) == 1
    assert main([], look=lambda _folder: replace(GOOD, disk=replace(DISK, write_refusal="no"))) == 1


def test_bad_arguments_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.touch()
    assert main(["--dir", str(file)], look=lambda _folder: GOOD) == 2
    assert "is not a folder" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        main(["--unknown"])
    assert stopped.value.code == 2


def test_a_real_look_suggests_flags_that_strata_takes_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = command_line.main(["doctor", "--json", "--dir", str(tmp_path / "new")])
    result = json.loads(capsys.readouterr().out)
    findings = {finding["name"]: finding for finding in result["findings"]}
    assert len(findings) == 10 and {finding["status"] for finding in findings.values()} <= {
        OK,
        WARNING,
        UNAVAILABLE,
    }
    assert all(finding["remedy"] for finding in findings.values() if finding["status"] != OK)
    assert code == (
        1 if any(one["needed"] and one["status"] == UNAVAILABLE for one in result["findings"]) else 0
    )
    assert (findings["io_uring"]["status"] == OK) == (probe_io_uring() is None)
    assert result["facts"]["copy_rate"] > 0
    assert list(tmp_path.iterdir()) == []
    words = [word for one in result["suggestions"] for word in (one["flag"], one["value"])]
    config = read_config(words, {}, "strata serve")
    assert config.cache.copy_threads in (1, 2)
    assert config.cache.device_memory == parse_size(
        next(one["value"] for one in result["suggestions"] if one["flag"] == "--device-memory")
    )


def test_a_disk_is_measured_where_there_is_room_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strata.cli.machine_facts.SPACE_TO_LEAVE", 1 << 60)
    facts = look_at_disk(tmp_path)
    assert facts.read_rate is None and "MiB are free" in (facts.not_measured or "")
    assert facts.write_refusal is None and facts.folder == tmp_path and facts.root == tmp_path
    (tmp_path / "somebody's").touch()
    assert look_at_disk(tmp_path).root == tmp_path / "strata-kv"
    (tmp_path / "strata-disk-root").touch()
    assert look_at_disk(tmp_path).root == tmp_path


def test_the_nearest_and_latest_mount_names_the_file_system(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "1 0 8:1 / / rw - ext4 /dev/a rw\n"
        f"2 1 8:2 / {tmp_path} rw shared:1 - xfs /dev/b rw\n"
        f"3 2 0:5 / {tmp_path} rw - tmpfs none rw\n"
        "4 1 8:3 / /elsewhere rw - btrfs /dev/c rw\n"
    )
    assert filesystem_of(tmp_path, mounts) == "tmpfs"
    assert filesystem_of(Path("/"), mounts) == "ext4"
    assert filesystem_of(tmp_path, tmp_path / "missing") == "unknown"


def lay_out(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_limits_of_both_versions_of_control_groups_are_read(tmp_path: Path) -> None:
    second = lay_out(
        tmp_path / "v2",
        {
            "proc/self/cgroup": "0::/outer/inner\n",
            "sys/fs/cgroup/outer/memory.max": "2147483648\n",
            "sys/fs/cgroup/outer/inner/memory.max": "max\n",
            "sys/fs/cgroup/outer/cpu.max": "max 100000\n",
            "sys/fs/cgroup/outer/inner/cpu.max": "150000 100000\n",
        },
    )
    assert (memory_limit(second), cpu_limit(second)) == (2 * GIB, 1.5)
    first = lay_out(
        tmp_path / "v1",
        {
            "proc/self/cgroup": "4:memory:/a\n2:cpu,cpuacct:/a\n",
            "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "1073741824\n",
            "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "50000\n",
            "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
    )
    assert (memory_limit(first), cpu_limit(first)) == (GIB, 0.5)
    assert (memory_limit(tmp_path), cpu_limit(tmp_path)) == (None, None)
