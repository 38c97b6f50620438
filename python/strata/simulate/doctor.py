"""What `strata doctor --json` measured, as fields of a hardware entry: memory, copies and disk. Nothing of a model's
steps is in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from strata.errors import ConfigError

_SOURCE = "strata doctor"


def hardware_of(doctor: Mapping[str, Any]) -> dict[str, Any]:
    """`device_bytes`, `host_bytes`, `copies` (one way, `threads`) and `disk`, which is missing where it could not be
    measured. Raises ConfigError if that is no output of `strata doctor --json`."""
    try:
        facts = doctor["facts"]
        memory, rate = float(facts["available_memory"]), float(facts["copy_rate"])
        disk = facts["disk"]
        read, write, free = disk["read_rate"], disk["write_rate"], disk["free_bytes"]
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"--doctor lacks {error}: give the whole output of `strata doctor --json`"
        ) from error

    def measured(value: float, unit: str) -> dict[str, Any]:
        return {"value": value, "unit": unit, "source": _SOURCE}

    found: dict[str, Any] = {
        "device_bytes": measured(memory, "bytes left within all limits"),
        "host_bytes": measured(memory, "bytes left within all limits"),
        "copies": {
            "threads": {
                "operation": "layer",
                "per_operation_s": 0.0,
                "to_device": measured(rate, "bytes/s of one thread"),
                "to_host": measured(rate, "bytes/s of one thread"),
                "prefill_share": 0.0,
                "decode_share": 0.0,
            }
        },
    }
    if read and write:
        found["disk"] = {
            "bytes": measured(float(free), "bytes free"),
            "read": measured(float(read), "bytes/s, one request at a time"),
            "write": measured(float(write), "bytes/s, one request at a time"),
            "per_operation_s": 0.0,
        }
    return found
