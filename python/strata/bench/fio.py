"""fio on one file of the folder that is measured: what the disk does with the same block size, depth and kind of
file, and nothing around it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from strata.errors import ConfigError, StorageError

REMEDY = "install it (Debian, Ubuntu: apt-get install fio), it is what the disk tier is measured beside"
_PATIENCE_S = 300.0
_HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""fio's buffers lie in transparent huge pages, as the store's host arena does: an I/O of 1 MiB is then one
stretch of memory instead of 256, which doubles the rate of some disks.
"""


def check_fio() -> str:
    """fio's version. Raises ConfigError if it is not installed."""
    if shutil.which("fio") is None:
        raise ConfigError(f"there is no fio on the PATH: {REMEDY}")
    return _run(["--version"]).strip()


class FioFile:
    """A preallocated file of `size` bytes in `folder`, read and written past the page cache by
    `ioengine`, `depth` blocks of `block` bytes at once. Every block is written before the first
    measurement.
    """

    def __init__(self, folder: Path, size: int, block: int, depth: int, ioengine: str) -> None:
        self._arguments = [
            "--name=strata",
            f"--filename={folder / 'fio.bin'}",
            f"--bs={block}",
            "--direct=1",
            "--fallocate=posix",
            "--overwrite=1",
            "--scramble_buffers=0",
            "--randrepeat=0",
            "--output-format=json",
            *_parallelism(ioengine, size, depth),
        ]
        self.rate("write")

    def rate(self, pattern: str) -> float:
        """Bytes per second of one pass over the file. `pattern` is fio's: read, write, randread, randwrite."""
        report: dict[str, Any] = json.loads(_run([*self._arguments, f"--rw={pattern}"]))
        found = report["jobs"][0]["read" if pattern.endswith("read") else "write"]
        return float(found["io_bytes"]) / (float(found["runtime"]) / 1e3)


def _parallelism(ioengine: str, size: int, depth: int) -> list[str]:
    """fio keeps `depth` blocks in flight: in one queue, or with a thread for each where calls block."""
    if ioengine == "io_uring":
        return ["--ioengine=io_uring", f"--iodepth={depth}", f"--size={size}"]
    part = size // depth
    return [
        "--ioengine=psync",
        "--thread",
        f"--numjobs={depth}",
        f"--offset_increment={part}",
        f"--size={part}",
        "--group_reporting",
    ]


def _run(arguments: list[str]) -> str:
    try:
        done = subprocess.run(
            ["fio", *arguments],
            env={**os.environ, **_HUGE_PAGES},
            capture_output=True,
            text=True,
            timeout=_PATIENCE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StorageError(f"fio did not run: {error}; {REMEDY}") from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise StorageError(f"fio failed with exit code {done.returncode}: {said}")
    return done.stdout
