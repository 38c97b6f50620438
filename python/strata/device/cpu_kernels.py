"""The same kernels built by the C++ compiler and run on plain memory: a grid is a loop on the calling thread.

For tests and for the fake device; it proves bytes and addresses, never speed. `cuda/shim/` has the other half.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import subprocess
from pathlib import Path

import numpy as np
import numpy.typing as npt

from strata.device.kernel_source import bundle, digest
from strata.device.kernels import THREADS, TRANSFER
from strata.errors import ConfigError

ENTRY = "shim/launch.cpp"
COMPILE_SECONDS = 120


class CpuKernels:
    """A built library. `launch` may be called from several threads at once; it lets go of the GIL."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._launch = self._library.strata_shim_launch
        self._launch.restype = ctypes.c_uint64
        self._launch.argtypes = [
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_uint32,
            ctypes.c_uint32,
            ctypes.c_uint64,
        ]

    @classmethod
    def build(
        cls, folder: Path, source: str | None = None, options: tuple[str, ...] = ("-O2",)
    ) -> CpuKernels:
        """Compile `source`, or the checkout's kernels, into `folder`. Raises ConfigError with the compiler's words
        where it fails. CXX names another compiler than c++."""
        text = bundle(ENTRY) if source is None else source
        folder.mkdir(parents=True, exist_ok=True)
        # A library that is loaded already is not loaded again from the same path, whatever was built there since.
        name = digest(text + str(options))[:16]
        path, library = folder / f"kernels-{name}.cpp", folder / f"kernels-{name}.so"
        path.write_text(text, encoding="utf-8")
        compiler = os.environ.get("CXX", "c++")
        command = [*shlex.split(compiler), "-std=c++14", *options, "-shared", "-fPIC"]
        command += [str(path), "-o", str(library)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=COMPILE_SECONDS
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ConfigError(
                f"the kernels cannot be built for the CPU with {compiler!r} ({error}): install a C++ compiler, or name"
                " one in CXX"
            ) from error
        if done.returncode != 0:
            raise ConfigError(f"{compiler} refuses the kernels' source:\n{done.stderr}")
        return cls(library)

    def launch(
        self,
        name: str,
        blocks: int,
        arguments: tuple[npt.NDArray[np.void]],
        *,
        threads: int = THREADS,
        seed: int = 0,
    ) -> int:
        """Run kernel `name` to its end; returns the words that it stored. `arguments` is what `kernels.arguments`
        gives, with addresses of plain memory. A `seed` other than 0 runs the grid's threads in an order drawn from
        it. Raises ConfigError for a name that the library has not."""
        (transfer,) = arguments
        if transfer.dtype != TRANSFER or transfer.size != 1:
            raise ConfigError(f"a kernel takes one strata_transfer, got {transfer.size} of {transfer.dtype}")
        try:
            kernel = ctypes.cast(self._library[name], ctypes.c_void_p)
        except AttributeError as error:
            raise ConfigError(f"there is no kernel {name!r} among those built for the CPU") from error
        return int(self._launch(kernel, transfer.ctypes.data, blocks, threads, seed))
