"""What a result was measured with, so that two can be compared. Nothing that names the machine or its user."""

from __future__ import annotations

import importlib.metadata
import platform
from datetime import datetime, timezone
from typing import Any

from strata.device.kernel_source import digest, kernel_source

PACKAGES = ("torch", "cupy-cuda13x", "cupy-cuda12x", "numpy", "flashinfer-python", "triton", "strata-kv")


def manifest(device: str, seed: int, flags: dict[str, object]) -> dict[str, Any]:
    """Versions, device, seed, flags, and the digest of the kernels' source."""
    return {
        "at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": device,
        "platform": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: version for name in PACKAGES if (version := _version(name)) is not None},
        "kernels": digest(kernel_source()),
        "seed": seed,
        "flags": flags,
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
