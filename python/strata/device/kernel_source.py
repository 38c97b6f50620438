"""The kernels' source as one text: NVRTC, CuPy and the C++ compiler all take the same bytes, so one digest names them.

A checkout has `cuda/`; an installed package has the text that `make cubins` left beside this file.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from strata.errors import ConfigError

CHECKOUT_SOURCES = Path(__file__).resolve().parents[3] / "cuda"
BUILT = Path(__file__).resolve().parent / "cubins"
ENTRY = "transfer.cu"

_INCLUDE = re.compile(r'^#include "([^"]+)"\n', re.MULTILINE)


def bundle(entry: str = ENTRY, folder: Path = CHECKOUT_SOURCES) -> str:
    """`entry` of `folder` with each quoted include replaced by that file's text, once. Raises ConfigError where one
    is missing."""
    included: set[str] = set()

    def text_of(name: str) -> str:
        if name in included:
            return ""
        included.add(name)
        path = folder / name
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"the kernels' source {path} cannot be read ({error.strerror}); it is part of a checkout of Strata"
            ) from error
        return _INCLUDE.sub(lambda match: text_of(match.group(1)), text)

    return text_of(entry)


def kernel_source() -> str:
    """The CUDA source: of the checkout if this is one, else what the package was built with. Raises ConfigError
    where there is neither."""
    if (CHECKOUT_SOURCES / ENTRY).exists():
        return bundle()
    try:
        return (BUILT / ENTRY).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"this package of Strata holds no GPU kernels ({BUILT / ENTRY} is missing): build it from a checkout after"
            " `make cubins`, or serve with --device cpu"
        ) from error


def digest(source: str) -> str:
    """SHA-256 of `source`, as hexadecimal digits."""
    return hashlib.sha256(source.encode()).hexdigest()
