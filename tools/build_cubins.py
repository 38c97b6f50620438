"""Builds the GPU kernels into python/strata/device/cubins, with what names their source; needs no GPU and no driver.

What is there is replaced as a whole, the manifest last: a build that was cut off leaves cubins that nobody takes.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from pathlib import Path

from nvrtc import VERSION, Nvrtc, NvrtcError
from strata.device.cubins import ARCHITECTURES, COMPILE_OPTIONS, MANIFEST, cubin_path
from strata.device.kernel_source import BUILT, ENTRY, bundle, digest


def build(folder: Path, source: str, compiler: Nvrtc) -> None:
    """Compile `source` for all architectures into `folder`. Raises NvrtcError where one refuses it."""
    compiled = {name: compiler.compile(source, name, COMPILE_OPTIONS).cubin for name in ARCHITECTURES}
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    for name, cubin in compiled.items():
        cubin_path(name, folder).write_bytes(cubin)
    (folder / ENTRY).write_text(source, encoding="utf-8")
    manifest = {
        "source": digest(source),
        "nvrtc": VERSION,
        "options": list(COMPILE_OPTIONS),
        "cubins": {name: hashlib.sha256(cubin).hexdigest() for name, cubin in compiled.items()},
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    try:
        build(BUILT, bundle(), Nvrtc())
    except NvrtcError as error:
        sys.exit(f"error: {error}")
    print(f"      {', '.join(ARCHITECTURES)} in {BUILT}", flush=True)


if __name__ == "__main__":
    main()
