"""NVIDIA's run-time compiler without a driver: compiles the kernels to PTX and cubins on any Linux machine.

It comes from PyPI and lies aside, in the environment's folder `cuda-build`: torch brings a newer one, whose PTX the
drivers of CUDA 13.0 refuse. Run as a program, this installs it.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

VERSION = "13.0.88"
REQUIREMENT = f"nvidia-cuda-nvrtc=={VERSION}"
FOLDER = Path(sys.prefix) / "cuda-build"
_LIBRARIES = FOLDER / "nvidia" / "cu13" / "lib"


class NvrtcError(Exception):
    """NVRTC is not there, or refuses a source."""


@dataclass(frozen=True)
class Compiled:
    """What came of one source for one architecture; `log` has the compiler's and the assembler's remarks."""

    ptx: str
    cubin: bytes
    log: str


def is_installed() -> bool:
    """Whether the very version lies in its folder."""
    return (FOLDER / f"nvidia_cuda_nvrtc-{VERSION}.dist-info").is_dir()


def install() -> None:
    """Let pip fetch NVRTC. Raises NvrtcError where it cannot."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"]
    done = subprocess.run([*command, "--target", str(FOLDER), REQUIREMENT], check=False)
    if done.returncode != 0:
        raise NvrtcError(
            f"pip could not install {REQUIREMENT} into {FOLDER}; its message is above. Without it the GPU kernels are"
            " not checked here, and CuPy compiles them at start"
        )


class Nvrtc:
    """The loaded library. Compilations may run in several threads."""

    def __init__(self) -> None:
        if not is_installed():
            raise NvrtcError(f"{REQUIREMENT} is not in {FOLDER}: run `make cubins` where PyPI can be reached")
        # The library looks for this one by name only; that it is loaded already is enough.
        ctypes.CDLL(str(_LIBRARIES / f"libnvrtc-builtins.so.{VERSION.rpartition('.')[0]}"))
        self._library = ctypes.CDLL(str(_LIBRARIES / "libnvrtc.so.13"))
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p

    def version(self) -> tuple[int, int]:
        """Major and minor."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        return major.value, minor.value

    def compile(self, source: str, architecture: str, options: tuple[str, ...] = ()) -> Compiled:
        """`source` for `architecture` (sm_90), with the assembler's report. Raises NvrtcError with the compiler's
        words where it is refused."""
        words = [f"--gpu-architecture={architecture}", "--ptxas-options=-v", *options]
        program = ctypes.c_void_p()
        created = self._library.nvrtcCreateProgram(
            ctypes.byref(program), source.encode(), b"transfer.cu", 0, None, None
        )
        self._check(created)
        try:
            encoded = (ctypes.c_char_p * len(words))(*(word.encode() for word in words))
            code = self._library.nvrtcCompileProgram(program, len(words), encoded)
            log = self._text(program, "ProgramLog").decode(errors="replace").rstrip("\0")
            if code != 0:
                raise NvrtcError(f"NVRTC {VERSION} refuses the kernels for {architecture}:\n{log}")
            ptx = self._text(program, "PTX").decode().rstrip("\0")
            return Compiled(ptx, self._text(program, "CUBIN"), log)
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _text(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._library, f"nvrtcGet{what}")(program, buffer))
        return buffer.raw

    def _check(self, code: int) -> None:
        if code != 0:
            raise NvrtcError(f"NVRTC {VERSION}: {self._library.nvrtcGetErrorString(code).decode()}")


def main() -> None:
    if is_installed():
        return
    print(f"      installing {REQUIREMENT} into {FOLDER}", flush=True)
    try:
        install()
    except NvrtcError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
