"""The kernels as `make cubins` built them for GPUs: which file fits a device, and whether it is still the source's.

A cubin runs on devices of its major compute capability and an equal or higher minor one. `manifest.json` says what the
files were built from: a file of another source, or one that was changed since, is refused rather than run.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

from strata.device.kernel_source import digest, kernel_source
from strata.errors import ConfigError

COMPILE_OPTIONS = ("--std=c++14",)
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
MANIFEST = "manifest.json"

_ARCHITECTURE = re.compile(r"sm_(\d+)(\d)")
_REMEDY = (
    "build them again with `make cubins`, or remove the folder to have CuPy compile the kernels at start"
)


def cubin_for(major: int, minor: int, folder: Path) -> Path | None:
    """The cubin in `folder` for a device of compute capability `major`.`minor`, or None if none was built. Raises
    ConfigError where the built ones are not of this source or not whole."""
    files = built(folder)
    architecture = _best(list(files), major, minor)
    return None if architecture is None else _checked(folder, architecture, files[architecture])


def built(folder: Path) -> dict[str, str]:
    """Digests of the cubins in `folder` by architecture; none if none were built. Raises ConfigError where they are not
    of this source."""
    try:
        text = (folder / MANIFEST).read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    try:
        manifest = json.loads(text)
        built_from, files = manifest["source"], dict(manifest["cubins"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{folder / MANIFEST} is not a manifest of cubins ({error!r}): {_REMEDY}"
        ) from error
    if built_from != digest(kernel_source()):
        raise ConfigError(f"the cubins in {folder} were built from another source than this one: {_REMEDY}")
    return files


def cubin_path(architecture: str, folder: Path) -> Path:
    """Where the cubin for `architecture` (sm_90) lies."""
    return folder / f"transfer.{architecture}.cubin"


def _best(architectures: list[str], major: int, minor: int) -> str | None:
    """The newest of `architectures` that runs on the device."""
    fitting = {}
    for architecture in architectures:
        match = _ARCHITECTURE.fullmatch(architecture)
        if match and int(match[1]) == major and int(match[2]) <= minor:
            fitting[int(match[2])] = architecture
    return fitting[max(fitting)] if fitting else None


def _checked(folder: Path, architecture: str, wanted: str) -> Path:
    path = cubin_path(architecture, folder)
    try:
        found = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}), but {MANIFEST} names it: {_REMEDY}"
        ) from error
    if found != wanted:
        raise ConfigError(f"{path} is not the file that {MANIFEST} describes: {_REMEDY}")
    return path
