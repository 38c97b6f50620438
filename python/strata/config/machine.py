"""What this machine leaves for Strata: memory within the control groups' limits, and space on a disk.

Every function takes its root folder as an argument, so that tests can lay out trees of any kind of machine.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path, PurePosixPath

_NO_LIMIT = 1 << 60
"""Version 1 control groups spell "no limit" as a page-rounded maximum; nothing real is this large."""


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that this process may still take: the least that the system and each of its control groups leave.

    Page cache counts as free, since the kernel gives it back. Raises OSError where /proc/meminfo is missing.
    """
    leaves = [_system_available(root)]
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            leaves += _group_leaves(
                root / "sys/fs/cgroup", group, "memory.max", "memory.current", "inactive_file"
            )
        elif "memory" in controllers.split(","):
            leaves += _group_leaves(
                root / "sys/fs/cgroup/memory",
                group,
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            )
    return max(0, min(leaves))


def memory_limit(root: Path = Path("/")) -> int | None:
    """The least limit in bytes that the control groups of this process set; None if they set none."""
    names = {"": ("sys/fs/cgroup", "memory.max"), "memory": ("sys/fs/cgroup/memory", "memory.limit_in_bytes")}
    limits = [_number(folder / name) for folder, name in _group_files(root, names)]
    return min((limit for limit in limits if limit is not None and limit < _NO_LIMIT), default=None)


def cpu_limit(root: Path = Path("/")) -> float | None:
    """The least number of cores that the control groups of this process may use in total; None without a limit."""
    names = {"": ("sys/fs/cgroup", "cpu.max"), "cpu": ("sys/fs/cgroup/cpu", "cpu.cfs_quota_us")}
    cores: list[float] = []
    for folder, name in _group_files(root, names):
        words = " ".join(_lines(folder / name)).split()
        if name == "cpu.cfs_quota_us":
            words += _lines(folder / "cpu.cfs_period_us")
        if len(words) == 2 and words[0].isdecimal() and words[1].isdecimal():
            cores.append(int(words[0]) / int(words[1]))
    return min(cores, default=None)


def disk_space(folder: Path) -> int:
    """Bytes that `folder` may fill: free space where it lies (or will lie), its own files counted as free."""
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    return shutil.disk_usage(existing).free + folder_bytes(folder)


def folder_bytes(folder: Path) -> int:
    """Bytes that the files under `folder` occupy on the disk, as `du` counts them; 0 for a missing folder."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_blocks * 512
            except FileNotFoundError:
                continue  # another process removed it between the listing and the look
    return total


def _group_files(root: Path, names: dict[str, tuple[str, str]]) -> list[tuple[Path, str]]:
    """(folder of a group of this process or of one above it, name of its file), for each controller in `names`."""
    found = []
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, group = line.split(":", 2)
        for controller in controllers.split(","):
            if controller in names:
                mount, name = names[controller]
                relative = PurePosixPath(group.lstrip("/"))
                found += [(root / mount / folder, name) for folder in (relative, *relative.parents)]
    return found


def _system_available(root: Path) -> int:
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{root / 'proc/meminfo'} names no MemAvailable; give --device-memory in bytes, e.g. 4GiB")


def _group_leaves(mount: Path, group: str, limit_name: str, usage_name: str, cache_name: str) -> list[int]:
    """What the group and each group above it leave; a group outside this mount's view is passed over."""
    leaves = []
    relative = PurePosixPath(group.lstrip("/"))
    for folder in [mount / relative, *((mount / parent) for parent in relative.parents)]:
        limit = _number(folder / limit_name)
        if limit is None or limit >= _NO_LIMIT:
            continue
        cache = 0
        for line in _lines(folder / "memory.stat"):
            name, _, value = line.partition(" ")
            if name == cache_name:
                cache = int(value)
        leaves.append(limit - max(0, (_number(folder / usage_name) or 0) - cache))
    return leaves


def _number(path: Path) -> int | None:
    """The whole number in a file; None where there is no such file or it says `max`."""
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0] != "max" else None


def _lines(path: Path) -> list[str]:
    """A file's lines; none where there is no such file or it may not be read."""
    try:
        return path.read_text(encoding="ascii", errors="replace").splitlines()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []
