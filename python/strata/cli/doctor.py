"""`strata doctor`: what this machine has for Strata, what it lacks and how to get it, and the flags that suit it.

`examine` and `suggest` are pure functions of the facts. Nothing that is missing makes the command fail, but it exits
with 1 if `strata serve` could not work as suggested: no memory for a device tier, or a folder that cannot be written.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from strata.cli.machine_facts import DiskFacts, GpuFacts, MachineFacts, gather
from strata.config import format_size
from strata.config.options import default_disk_path

OK = "ok"
WARNING = "warning"
UNAVAILABLE = "unavailable"
_COLOURS = {OK: "green", WARNING: "yellow", UNAVAILABLE: "red"}

LEAST_MEMORY = 1 << 30
"""Below this the default model and a few pages do not fit."""
_MEMORY_SHARE = 0.25
_DISK_SHARE = 0.25
_SIZE_STEP = 256 << 20
_SLOW_DISK = 50e6
"""Bytes a second below which small models are computed about as fast as they are read."""
_MEMORY_FILESYSTEMS = ("tmpfs", "ramfs")


@dataclass(frozen=True)
class Finding:
    """One thing looked at. `remedy` is empty where there is nothing to mend; `needed` things fail the command."""

    name: str
    status: str
    detail: str
    remedy: str = ""
    needed: bool = False


@dataclass(frozen=True)
class Suggestion:
    """A flag of `strata serve`, its value, and why."""

    flag: str
    value: str
    reason: str


def examine(facts: MachineFacts) -> list[Finding]:
    """What the facts mean, in the order of the road from memory to disk."""
    return [
        _memory(facts),
        _cores(facts),
        _huge_pages(facts),
        _locked_memory(facts),
        Finding("host copies", OK, f"{_rate(facts.copy_rate)} by one thread"),
        _io_uring(facts),
        _folder(facts.disk),
        _direct(facts.disk),
        _disk_speed(facts.disk),
        _gpu(facts.gpu),
    ]


def suggest(facts: MachineFacts) -> list[Suggestion]:
    """The flags that suit the facts; sizes are rounded down, so that they hold on a machine in use."""
    return [*(_gpu_flags(facts) if facts.gpu.serves else _cpu_flags(facts)), *_disk_flags(facts.disk)]


def _gpu_flags(facts: MachineFacts) -> list[Suggestion]:
    """None for copy threads, which a GPU refuses, and none for its own memory: the server takes what is free there."""
    size = _rounded(facts.available_memory * 2 * _MEMORY_SHARE)
    reason = f"half: {_left(facts)}; on a GPU it keeps the size that it starts with"
    return [
        Suggestion("--device", "cuda", f"{facts.gpu.devices[0]}; its tier takes 80% of what is free there"),
        Suggestion("--host-memory", _size(size), reason),
    ]


def _cpu_flags(facts: MachineFacts) -> list[Suggestion]:
    share = _rounded(facts.available_memory * _MEMORY_SHARE)
    cores = _cores_of(facts)
    threads = 2 if cores >= 4 else 1
    return [
        Suggestion("--device-memory", _size(share), f"a quarter: {_left(facts)}"),
        Suggestion(
            "--host-memory",
            _size(share),
            "as much again; the rest is for weights, activations and page cache",
        ),
        Suggestion(
            "--copy-threads",
            str(threads),
            f"{cores:g} cores compute; one thread copies {_rate(facts.copy_rate)}"
            + ("" if threads > 1 else ", and a second would take a core from decoding"),
        ),
    ]


def _disk_flags(disk: DiskFacts) -> list[Suggestion]:
    if disk.write_refusal or disk.filesystem in _MEMORY_FILESYSTEMS:
        why = disk.write_refusal or f"{disk.filesystem} is memory, which the host tier uses better"
        return [Suggestion("--disk-capacity", "0", f"no disk tier in {disk.folder}: {why}")]
    capacity = _rounded(disk.free_bytes * _DISK_SHARE)
    return [
        Suggestion("--disk-path", str(disk.root), f"a folder of its own on {disk.filesystem}"),
        Suggestion(
            "--disk-capacity", _size(capacity), f"a quarter of the {format_size(disk.free_bytes)} free"
        ),
    ]


def _left(facts: MachineFacts) -> str:
    return f"{format_size(facts.available_memory)} of memory are left within all limits"


def _memory(facts: MachineFacts) -> Finding:
    limit = facts.memory_limit
    detail = f"{format_size(facts.physical_memory)} built in, {format_size(facts.available_memory)} left"
    if limit is not None and limit < facts.physical_memory:
        detail += f"; a control group allows {format_size(limit)}"
    if facts.available_memory < LEAST_MEMORY:
        remedy = f"free memory, or raise the control group's limit: {format_size(LEAST_MEMORY)} is the least"
        return Finding("memory", UNAVAILABLE, detail, remedy, needed=True)
    return Finding("memory", OK, detail)


def _cores(facts: MachineFacts) -> Finding:
    detail = f"{facts.usable_cores} of {facts.physical_cores} cores usable"
    if facts.cpu_limit is not None and facts.cpu_limit < facts.usable_cores:
        return Finding(
            "cores",
            WARNING,
            f"{detail}, but a control group stops this process after {facts.cpu_limit:g} cores' worth of time",
            f"start with --threads {max(1, int(facts.cpu_limit))}, or raise the limit (cpu.max)",
        )
    return Finding("cores", OK, detail)


def _huge_pages(facts: MachineFacts) -> Finding:
    state = facts.transparent_huge_pages or "not in this kernel"
    detail = f"transparent huge pages: {state}; reserved huge pages: {facts.reserved_huge_pages}"
    if facts.transparent_huge_pages not in ("always", "madvise"):
        remedy = (
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled makes copies of small pieces faster"
        )
        return Finding("huge pages", WARNING, detail, remedy)
    return Finding("huge pages", OK, detail)


def _locked_memory(facts: MachineFacts) -> Finding:
    if facts.memlock is None:
        return Finding("locked memory", OK, "no limit")
    detail = f"limit of {format_size(facts.memlock)}"
    if facts.gpu.devices and facts.memlock < facts.physical_memory // 4:
        remedy = "raise it (ulimit -l unlimited): pinned host memory for GPU copies counts against it"
        return Finding("locked memory", WARNING, detail, remedy)
    return Finding("locked memory", OK, f"{detail}; without a GPU nothing is locked")


def _io_uring(facts: MachineFacts) -> Finding:
    if facts.io_uring_refusal is None:
        return Finding("io_uring", OK, "a ring was set up")
    remedy = (
        "the disk tier works with threads; to use io_uring, allow it in the container's seccomp profile and set "
        "kernel.io_uring_disabled to 0"
    )
    return Finding("io_uring", UNAVAILABLE, f"refused: {facts.io_uring_refusal}", remedy)


def _folder(disk: DiskFacts) -> Finding:
    detail = f"{disk.folder} on {disk.filesystem}, {format_size(disk.free_bytes)} free"
    if disk.write_refusal:
        remedy = "name another folder with --dir, change its owner, or serve with --disk-capacity 0"
        return Finding("disk folder", UNAVAILABLE, f"{detail}: {disk.write_refusal}", remedy, needed=True)
    if disk.filesystem in _MEMORY_FILESYSTEMS:
        remedy = "name a folder on a disk with --dir: what lies here takes memory and is gone after a restart"
        return Finding("disk folder", WARNING, detail, remedy)
    if disk.filesystem == "overlay":
        remedy = "mount a volume and name it with --dir: a container's own files are gone with it"
        return Finding("disk folder", WARNING, detail, remedy)
    return Finding("disk folder", OK, detail)


def _direct(disk: DiskFacts) -> Finding:
    if disk.write_refusal:
        return Finding("O_DIRECT", UNAVAILABLE, "not tried: the folder cannot be written", "see disk folder")
    if disk.direct_refusal:
        remedy = f"{disk.filesystem} goes through the page cache, which works; ext4 and xfs take O_DIRECT"
        return Finding("O_DIRECT", WARNING, f"refused: {disk.direct_refusal}", remedy)
    return Finding("O_DIRECT", OK, "a block was written and read back")


def _disk_speed(disk: DiskFacts) -> Finding:
    if disk.read_rate is None or disk.write_rate is None:
        reason = disk.not_measured or "no reason given"
        return Finding(
            "disk speed", UNAVAILABLE, f"not measured: {reason}", "free space, or name another --dir"
        )
    detail = f"reads {_rate(disk.read_rate)}, writes {_rate(disk.write_rate)}, one request at a time"
    if disk.read_rate < _SLOW_DISK:
        remedy = (
            "a local SSD pays off more: from here small models are computed about as fast as they are read"
        )
        return Finding("disk speed", WARNING, detail, remedy)
    return Finding("disk speed", OK, detail)


def _gpu(gpu: GpuFacts) -> Finding:
    devices = ", ".join(gpu.devices)
    if gpu.devices and gpu.cupy_refusal is not None:
        return Finding("GPU", WARNING, f"{devices}, but {gpu.cupy_refusal}", "pip install 'strata-kv[cuda]'")
    if gpu.devices and gpu.cuda_refusal is not None:
        remedy = "do what it says; until then --device cpu serves"
        return Finding(
            "GPU", WARNING, f"{devices}, but --device cuda does not start: {gpu.cuda_refusal}", remedy
        )
    if gpu.devices:
        kernels = f"cubins for {', '.join(gpu.cubins)}" if gpu.cubins else "compiled at start (no cubins)"
        driver = f"driver {gpu.driver}" if gpu.driver else "a driver without a version"
        return Finding("GPU", OK, f"{devices}; {driver}; CuPy {gpu.cupy}; kernels: {kernels}")
    if gpu.cubins_refusal is not None:
        return Finding("GPU", WARNING, f"no GPU, and {gpu.cubins_refusal}", "make cubins")
    if gpu.driver is None:
        return Finding("GPU", UNAVAILABLE, "no NVIDIA driver", "none is needed: everything runs on the CPU")
    remedy = "install a torch that is built for this driver's CUDA, and the extra strata-kv[cuda]"
    return Finding("GPU", WARNING, f"a driver ({gpu.driver}), but {gpu.torch_refusal}", remedy)


def _cores_of(facts: MachineFacts) -> float:
    return min(float(facts.usable_cores), facts.cpu_limit or float("inf"))


def _rounded(size: float) -> int:
    """Down to a multiple of 256 MiB, or of 1 MiB where that is nothing; at least 1 MiB."""
    return max(1 << 20, int(size) // _SIZE_STEP * _SIZE_STEP or int(size) >> 20 << 20)


def _size(size: int) -> str:
    """As a flag takes it, such as `512MiB`."""
    return f"{size >> 30}GiB" if size % (1 << 30) == 0 else f"{size >> 20}MiB"


def _rate(rate: float) -> str:
    return f"{rate / 1e9:.2f} GB/s" if rate >= 1e9 else f"{rate / 1e6:.0f} MB/s"


def main(
    arguments: Sequence[str],
    program: str = "strata doctor",
    look: Callable[[Path], MachineFacts] = gather,
) -> int:
    """Looks, judges and tells. Returns 0, 1 if something needed is missing, 2 for bad arguments."""
    parser = argparse.ArgumentParser(
        prog=program,
        allow_abbrev=False,
        description="What this machine has for Strata, what it lacks, and the flags of `strata serve` that suit it.",
    )
    parser.add_argument(
        "--dir",
        type=Path,
        default=default_disk_path(),
        metavar="D",
        help="folder of the disk tier; a file of 64 MiB is written beside it and removed (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="write one JSON object to standard output")
    options = parser.parse_args(arguments)
    folder = options.dir.expanduser()
    if folder.exists() and not folder.is_dir():
        print(f"error: --dir {folder} is not a folder; name the folder of the disk tier", file=sys.stderr)
        return 2
    facts = look(folder)
    findings, suggestions = examine(facts), suggest(facts)
    if options.json:
        result = {
            "findings": [dataclasses.asdict(finding) for finding in findings],
            "suggestions": [dataclasses.asdict(suggestion) for suggestion in suggestions],
            "facts": dataclasses.asdict(facts),
        }
        print(json.dumps(result, indent=2, default=str))
    else:
        _show(findings, suggestions)
    return 1 if any(finding.needed and finding.status == UNAVAILABLE for finding in findings) else 0


def _show(findings: Sequence[Finding], suggestions: Sequence[Suggestion]) -> None:
    console = Console()
    table = Table(title="this machine", title_justify="left")
    for column in ("what", "state", "found", "what to do"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        state = f"[{_COLOURS[finding.status]}]{finding.status}[/]"
        table.add_row(finding.name, state, finding.detail, finding.remedy)
    flags = Table(title="flags that suit it", title_justify="left")
    for column in ("flag", "why"):
        flags.add_column(column, overflow="fold")
    for suggestion in suggestions:
        flags.add_row(f"{suggestion.flag} {suggestion.value}", suggestion.reason)
    console.print(table, flags, sep="\n")
    line = " ".join(f"{suggestion.flag} {shlex.quote(suggestion.value)}" for suggestion in suggestions)
    console.print(f"{serve_command(sys.argv[0])} {line}", soft_wrap=True, markup=False)


def serve_command(program: str) -> str:
    """How the server is started by the user who ran `program`: a virtual environment need not be on PATH."""
    if shutil.which("strata"):
        return "strata serve"
    if Path(program).name == "strata":
        return f"{shlex.quote(program)} serve"
    return f"{shlex.quote(sys.executable)} -m strata.serve"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], program="python -m strata.cli.doctor"))
