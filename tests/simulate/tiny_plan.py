"""A machine so slow and a trace so regular that what each size does is known beforehand.

`CONTEXTS` contexts are asked about in turn, each question `GAP_S` after the one before. One page is `PAGE_BYTES`. The
device holds one context, so that every question but the first about a context needs it from the host or computes it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from strata.simulate.constants import table

CONTEXTS = 4
ROUNDS = 110
"""So many that the first, which computes everything, is less than 1 in 100."""
GAP_S = 5.0
PAGE_TOKENS = 16
PAGE_BYTES = PAGE_TOKENS * 2 * 2 * 64 * 2 * 2
"""Two layers, K and V, two heads of 64, bfloat16."""
CONTEXT_PAGES = 32
OWN_PAGES = 2
"""A question and its answer."""
CYCLE_BYTES = CONTEXTS * (CONTEXT_PAGES + OWN_PAGES) * PAGE_BYTES
"""What is touched between two questions about one context: LRU keeps a context through it, or never."""
MODEL = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 128,
    "vocab_size": 64,
    "torch_dtype": "bfloat16",
}


def write_trace(folder: Path, requests: int = CONTEXTS * ROUNDS) -> Path:
    """The trace, in Mooncake's form: a block that is shared, and one of the request's own."""
    path = folder / "trace.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for number in range(requests):
            record = {
                "timestamp": number * GAP_S * 1000,
                "input_length": 512 + PAGE_TOKENS,
                "output_length": 8,
                "hash_ids": [number % CONTEXTS, 1000 + number],
            }
            file.write(json.dumps(record) + "\n")
    return path


def write_hardware(folder: Path, disk_read: float = 1e9) -> Path:
    """A device that takes about a second for a context and that a context's load does not hold up."""
    path = folder / "slow.json"
    weights = 1e6
    hardware: dict[str, Any] = {
        "peak_flops": {"value": 4e8, "unit": "FLOP/s", "source": "a test"},
        "memory_bandwidth": 1e9,
        "prefill_efficiency": 0.5,
        "decode_efficiency": 0.5,
        "step_overhead_s": 0.001,
        "device_bytes": (CONTEXT_PAGES + 16) * PAGE_BYTES + weights,
        "device_share": 1.0,
        "host_bytes": 1e9,
        "copies": {
            "kernel": {
                "operation": "layer",
                "per_operation_s": 1e-6,
                "to_device": 1e9,
                "to_host": 1e9,
                "prefill_share": 0.0,
                "decode_share": 0.0,
            }
        },
        "disk": {"bytes": 1e9, "read": disk_read, "write": 1e9, "per_operation_s": 1e-6},
    }
    path.write_text(json.dumps(hardware), encoding="utf-8")
    return path


def write_model(folder: Path) -> Path:
    """The model's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(MODEL), encoding="utf-8")
    return path


def write_table(folder: Path) -> Path:
    """Strata's table, with a system that copies every page down at once: nothing depends on access counts."""
    constants = table()
    constants["systems"]["ours"] = {
        **constants["systems"]["ours"],
        "write_policy": "through",
        "disk_write_policy": "through",
    }
    path = folder / "constants.json"
    path.write_text(json.dumps(constants), encoding="utf-8")
    return path


def flags(folder: Path) -> list[str]:
    """The flags of `strata plan` but for the target and the sizes."""
    return [
        *("--trace", str(write_trace(folder))),
        *("--model", str(write_model(folder))),
        *("--hardware", str(write_hardware(folder))),
        *("--constants", str(write_table(folder))),
    ]
