"""What `strata doctor` looks at, each found out by trying it: a ring is set up, a file is read, bytes are copied.

Nothing here judges, and nothing fails: what cannot be had is told as the reason why. Files are removed again.
"""

from __future__ import annotations

import importlib
import importlib.util
import mmap
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from strata._core import probe_io_uring
from strata.bench.bandwidth import CopyBaseline
from strata.bench.report import median
from strata.config import format_size
from strata.config.machine import available_memory, cpu_limit, memory_limit
from strata.device import cubins
from strata.device.cupy_runtime import CupyRuntime
from strata.device.kernel_source import BUILT
from strata.errors import ConfigError, StrataError

MEASURED_FILE_BYTES = 64 << 20
SPACE_TO_LEAVE = 256 << 20
"""Free space that a measurement must leave on the disk."""
DISK_ROOT_MARKER = "strata-disk-root"
"""The file that the disk store puts into a folder that is its own."""
_BLOCK = 1 << 20
_PHASE_SECONDS = 2.0
"""Longest that writing, and reading, may take: a slow disk is measured by what it did until then."""
_COPY_BYTES = 64 << 20
_COPY_ROUNDS = 5


@dataclass(frozen=True)
class DiskFacts:
    """`folder` exists and lies on `filesystem`; `root` is where a disk tier in it would lie.

    Refusals are None where there was none; rates are bytes a second.
    """

    folder: Path
    root: Path
    filesystem: str
    free_bytes: int
    write_refusal: str | None
    direct_refusal: str | None
    read_rate: float | None = None
    write_rate: float | None = None
    not_measured: str | None = None


@dataclass(frozen=True)
class GpuFacts:
    """`devices` are those that torch sees, `cubins` the architectures that kernels were built for. Refusals are None
    where there was none; `cuda_refusal` is why `--device cuda` cannot start, where there is a device to try."""

    driver: str | None
    devices: tuple[str, ...]
    torch_refusal: str | None
    cupy_refusal: str | None
    cupy: str | None = None
    cubins: tuple[str, ...] = ()
    cubins_refusal: str | None = None
    cuda_refusal: str | None = None

    @property
    def serves(self) -> bool:
        """Whether `--device cuda` starts here."""
        return bool(self.devices) and self.cupy_refusal is None and self.cuda_refusal is None


@dataclass(frozen=True)
class MachineFacts:
    """Everything that the findings follow from. Sizes are bytes, rates bytes a second; None: no limit, no refusal."""

    io_uring_refusal: str | None
    memlock: int | None
    transparent_huge_pages: str
    reserved_huge_pages: int
    physical_memory: int
    memory_limit: int | None
    available_memory: int
    physical_cores: int
    usable_cores: int
    cpu_limit: float | None
    copy_rate: float
    disk: DiskFacts
    gpu: GpuFacts


def gather(folder: Path) -> MachineFacts:
    """Looks at this machine, and at the disk that `folder` lies on or will lie on. Takes some seconds."""
    memlock, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return MachineFacts(
        io_uring_refusal=probe_io_uring(),
        memlock=None if memlock == resource.RLIM_INFINITY else memlock,
        transparent_huge_pages=_transparent_huge_pages(),
        reserved_huge_pages=int(_first_line(Path("/proc/sys/vm/nr_hugepages")) or 0),
        physical_memory=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        memory_limit=memory_limit(),
        available_memory=available_memory(),
        physical_cores=os.cpu_count() or 1,
        usable_cores=len(os.sched_getaffinity(0)),
        cpu_limit=cpu_limit(),
        copy_rate=measure_copy(),
        disk=look_at_disk(folder),
        gpu=look_for_gpu(),
    )


def measure_copy() -> float:
    """Bytes a second of one thread with non-temporal stores, read and written once each: a median."""
    baseline = CopyBaseline(_COPY_BYTES, 1)
    return 1e9 * median([baseline.streaming() for _ in range(_COPY_ROUNDS)])


def look_at_disk(folder: Path) -> DiskFacts:
    """Writes a file of at most 64 MiB where `folder` lies or will lie, reads it back and removes it."""
    existing = folder.absolute()
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    facts = DiskFacts(existing, _root_in(folder.absolute()), filesystem_of(existing), free, None, None)
    try:
        with tempfile.NamedTemporaryFile(prefix=".strata-doctor-", dir=existing) as file:
            return _measure_disk(facts, Path(file.name))
    except OSError as error:
        reason = error.strerror or str(error)
        return replace(facts, write_refusal=reason, not_measured="nothing can be written there")


def _measure_disk(facts: DiskFacts, path: Path) -> DiskFacts:
    facts = replace(facts, direct_refusal=_try_direct(path))
    needed = MEASURED_FILE_BYTES + SPACE_TO_LEAVE
    if facts.free_bytes < needed:
        short = f"only {facts.free_bytes >> 20} MiB are free, {needed >> 20} are needed"
        return replace(facts, not_measured=short)
    flags = 0 if facts.direct_refusal else os.O_DIRECT
    try:
        write_rate = _timed(path, os.O_WRONLY | flags, _write_blocks)
        read_rate = _timed(path, os.O_RDONLY | flags, _read_blocks)
    except OSError as error:
        return replace(facts, not_measured=error.strerror or str(error))
    return replace(facts, read_rate=read_rate, write_rate=write_rate)


def _root_in(folder: Path) -> Path:
    """The folder itself if a disk tier may fill it, else one of its own in it."""
    try:
        is_free = not folder.exists() or (folder / DISK_ROOT_MARKER).exists() or not any(folder.iterdir())
    except OSError:
        is_free = True  # that it cannot be read is told by what cannot be written there
    return folder if is_free else folder / "strata-kv"


def filesystem_of(folder: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """The type of the file system that `folder` lies on, such as `ext4` or `overlay`; "unknown" if not told."""
    resolved = folder.resolve()
    depth, found = -1, "unknown"
    for line in _lines(mounts):
        before, _, after = line.partition(" - ")
        fields = before.split()
        if len(fields) < 5 or not after:
            continue
        point = Path(fields[4].replace("\\040", " "))
        # Of two mounts on one point, the later one is seen.
        if resolved.is_relative_to(point) and len(point.parts) >= depth:
            depth, found = len(point.parts), after.split()[0]
    return found


def look_for_gpu() -> GpuFacts:
    """What driver there is, which GPUs torch sees, whether cupy can be imported, which kernels are built, and whether
    all of it works together: the kernels are loaded as `strata serve --device cuda` would."""
    driver = _first_line(Path("/proc/driver/nvidia/version"))
    devices: tuple[str, ...] = ()
    try:
        torch = importlib.import_module("torch")
        if torch.version.cuda is None:
            torch_refusal: str | None = "this torch is built for CPUs only"
        elif not torch.cuda.is_available():
            torch_refusal = f"torch for CUDA {torch.version.cuda} sees no GPU"
        else:
            torch_refusal = None
            devices = tuple(
                _device(torch.cuda.get_device_properties(index)) for index in range(torch.cuda.device_count())
            )
    except ImportError as error:
        torch_refusal = str(error)
    cupy: str | None = None
    cupy_refusal = None
    if importlib.util.find_spec("cupy") is None:
        cupy_refusal = "cupy is not installed"
    else:
        try:
            cupy = str(importlib.import_module("cupy").__version__)
        except ImportError as error:
            cupy_refusal = str(error)
    found = GpuFacts(driver, devices, torch_refusal, cupy_refusal, cupy)
    try:
        found = replace(found, cubins=tuple(cubins.built(BUILT)))
    except ConfigError as error:
        found = replace(found, cubins_refusal=str(error))
    if devices and cupy is not None:
        try:
            CupyRuntime()
        except (StrataError, RuntimeError) as error:
            found = replace(found, cuda_refusal=str(error))
    return found


def _device(properties: Any) -> str:
    """One GPU in words, from what torch knows of it."""
    memory = format_size(properties.total_memory)
    return f"{properties.name} (sm_{properties.major}{properties.minor}, {memory})"


def _try_direct(path: Path) -> str | None:
    """Writes and reads one block with O_DIRECT; the reason if that is refused."""
    try:
        with _opened(path, os.O_RDWR | os.O_DIRECT) as descriptor, mmap.mmap(-1, 4096) as block:
            os.pwrite(descriptor, block, 0)
            os.preadv(descriptor, [block], 0)
    except OSError as error:
        return error.strerror or str(error)
    return None


class _opened:
    """A file descriptor for the length of a `with`."""

    def __init__(self, path: Path, flags: int) -> None:
        self._descriptor = os.open(path, flags)

    def __enter__(self) -> int:
        return self._descriptor

    def __exit__(self, *_exception: object) -> None:
        os.close(self._descriptor)


def _timed(path: Path, flags: int, work: Callable[[int, mmap.mmap], int]) -> float:
    """Bytes a second of `work`, which says how many bytes it did."""
    with _opened(path, flags) as descriptor, mmap.mmap(-1, _BLOCK) as block:
        start = time.perf_counter()
        done = work(descriptor, block)
        return done / (time.perf_counter() - start)


def _write_blocks(descriptor: int, block: mmap.mmap) -> int:
    # Some disks store equal bytes in no time.
    block.write(os.urandom(_BLOCK))
    done, end = 0, time.perf_counter() + _PHASE_SECONDS
    while done < MEASURED_FILE_BYTES and time.perf_counter() < end:
        done += os.pwrite(descriptor, block, done)
    os.fdatasync(descriptor)
    return done


def _read_blocks(descriptor: int, block: mmap.mmap) -> int:
    # Without O_DIRECT the file is in memory still; this asks the kernel to forget it.
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    done, end = 0, time.perf_counter() + _PHASE_SECONDS
    while time.perf_counter() < end:
        read = os.preadv(descriptor, [block], done)
        if read == 0:
            break
        done += read
    return done


def _transparent_huge_pages() -> str:
    """`always`, `madvise` or `never`; empty where the kernel has none."""
    line = _first_line(Path("/sys/kernel/mm/transparent_hugepage/enabled")) or ""
    return line.partition("[")[2].partition("]")[0]


def _first_line(path: Path) -> str | None:
    lines = _lines(path)
    return lines[0] if lines else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
