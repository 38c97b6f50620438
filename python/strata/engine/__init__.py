"""The engine: takes a plan, runs the model, samples, reports back. It decides nothing; Core does.

The words of `api` cost nothing to import; `Engine` and the model bring torch and are loaded when they are asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from strata.engine.api import (
    Chunk,
    EngineProtocol,
    GenerationRequest,
    Grammar,
    Health,
    RequestStream,
    SamplingParams,
    TierReport,
    TokenLogprob,
    TokenSources,
    Usage,
)

if TYPE_CHECKING:
    from strata.engine.engine import Engine
    from strata.engine.served_model import ServedModel, load_served_model

_LAZY = {
    "Engine": "strata.engine.engine",
    "ServedModel": "strata.engine.served_model",
    "load_served_model": "strata.engine.served_model",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


__all__ = [
    "Chunk",
    "Engine",
    "EngineProtocol",
    "GenerationRequest",
    "Grammar",
    "Health",
    "RequestStream",
    "SamplingParams",
    "ServedModel",
    "TierReport",
    "TokenLogprob",
    "TokenSources",
    "Usage",
    "load_served_model",
]
