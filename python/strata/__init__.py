"""Strata: a hierarchical KV cache and serving engine for long-context language models.

`TieredCache` is the cache over device, host and disk for engines that schedule for themselves, `Scheduler` adds
Strata's batches to it, `Cache` is a prefix cache over pages that the engine keeps itself, and `Engine` serves a
model. All are loaded when they are first asked for, so that importing the package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from strata._core import version as _version

if TYPE_CHECKING:
    from strata._core import HostArena, Plan, Refusal, TransferQueue
    from strata.cache import (
        Cache,
        CopyMover,
        Match,
        Movement,
        Scheduler,
        Ticket,
        TieredCache,
        TieredMatch,
        TierUsage,
    )
    from strata.config import StrataConfig
    from strata.device.cuda import CudaMover
    from strata.engine import GenerationRequest, SamplingParams, ServedModel
    from strata.engine.cuda_carrier import CudaCarrier
    from strata.engine.engine import Engine

__version__: str = _version()

_LAZY = {
    "Cache": "strata.cache",
    "CopyMover": "strata.cache",
    "CudaCarrier": "strata.engine.cuda_carrier",
    "CudaMover": "strata.device.cuda",
    "Engine": "strata.engine",
    "GenerationRequest": "strata.engine",
    "HostArena": "strata._core",
    "Match": "strata.cache",
    "Movement": "strata.cache",
    "Plan": "strata._core",
    "Refusal": "strata._core",
    "SamplingParams": "strata.engine",
    "Scheduler": "strata.cache",
    "ServedModel": "strata.engine",
    "StrataConfig": "strata.config",
    "Ticket": "strata.cache",
    "TierUsage": "strata.cache",
    "TieredCache": "strata.cache",
    "TieredMatch": "strata.cache",
    "TransferQueue": "strata._core",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


__all__ = [
    "Cache",
    "CopyMover",
    "CudaCarrier",
    "CudaMover",
    "Engine",
    "GenerationRequest",
    "HostArena",
    "Match",
    "Movement",
    "Plan",
    "Refusal",
    "SamplingParams",
    "Scheduler",
    "ServedModel",
    "StrataConfig",
    "Ticket",
    "TierUsage",
    "TieredCache",
    "TieredMatch",
    "TransferQueue",
    "__version__",
]
