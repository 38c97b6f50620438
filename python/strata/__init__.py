"""Strata: a hierarchical KV cache and serving engine for long-context language models.

`Cache` is the prefix cache for engines that own their pages; `Engine` serves a model over device, host and disk.
Both are loaded when they are first asked for, so that importing the package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from strata._core import version as _version

if TYPE_CHECKING:
    from strata.cache import Cache, Match
    from strata.config import StrataConfig
    from strata.engine import GenerationRequest, SamplingParams, ServedModel
    from strata.engine.engine import Engine

__version__: str = _version()

_LAZY = {
    "Cache": "strata.cache",
    "Engine": "strata.engine",
    "GenerationRequest": "strata.engine",
    "Match": "strata.cache",
    "SamplingParams": "strata.engine",
    "ServedModel": "strata.engine",
    "StrataConfig": "strata.config",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


__all__ = [
    "Cache",
    "Engine",
    "GenerationRequest",
    "Match",
    "SamplingParams",
    "ServedModel",
    "StrataConfig",
    "__version__",
]
