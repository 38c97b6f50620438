"""Step logs of machines that are known exactly: steps of many shapes, timed by the simulator's own cost of a step."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from strata import _core

MODEL: dict[str, Any] = {
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
SERVED = {**MODEL, "kv_cache_dtype": "float32"}
PAGE_SIZE = 16
PAGE_BYTES = 30 * 2 * 3 * 64 * 4 * PAGE_SIZE
COSTS = {
    "peak_flops": 1e11,
    "memory_bandwidth": 8e9,
    "row_overhead_s": 2e-3,
    "prefill_gather_bandwidth": 5e8,
    "decode_gather_bandwidth": 2e9,
}
GAP_S = 1e-4
LINK = (1e-3, 5e9)
"""Seconds a transfer and bytes a second."""
Row = tuple[int, int, bool]


def machine(**changes: Any) -> dict[str, Any]:
    """The machine that the logs are of."""
    link = {"operation": "layer", "per_operation_s": LINK[0] / 30, "to_device": LINK[1], "to_host": LINK[1]}
    return {
        "name": "known",
        **COSTS,
        "prefill_efficiency": 1.0,
        "decode_efficiency": 1.0,
        "step_overhead_s": GAP_S,
        "overlaps_reads": False,
        "device_bytes": 2e9,
        "device_share": 1.0,
        "host_bytes": 1e9,
        "copies": {"threads": {**link, "prefill_share": 0.0, "decode_share": 0.0}},
        **changes,
    }


def header(**changes: Any) -> dict[str, Any]:
    """The first line, of a server with its default settings and no disk."""
    cache = {
        "page_size": PAGE_SIZE,
        "write_policy": "through",
        "disk_write_policy": "through",
        "selective_accesses": 2,
        "prefetch_policy": "adaptive",
        "prefetch_timeout_s": 30.0,
        "prefetch_timeout_per_1k_s": 1.0,
        "prefetch_share": 0.8,
        "load_policy": "quicker",
    }
    scheduler = {
        "policy": "adaptive",
        "scheduler_off": "bubbles, early-loads",
        "load_ratio": 100.0,
        "deferral_tokens": 100,
        "deferral_factor": 2.0,
        "early_share": 0.25,
        "max_wait_s": 60.0,
        "outstanding_plans": 2,
        "batch_tokens": 512,
        "max_running": 64,
        "max_decode_stall_ms": 1000,
    }
    return {
        "log": "strata steps",
        "version": 1,
        "model": {"name": "known", "layers": 30, "hidden_size": 576},
        "dtype": "float32",
        "page_bytes": PAGE_BYTES,
        "pages": {"device": 500, "host": 900, "disk": 0},
        "copy_threads": 1,
        "settings": {"cache": cache, "scheduler": scheduler, "threads": 0},
        **changes,
    }


def shapes(count: int, seed: int = 0) -> list[tuple[bool, list[Row]]]:
    """Steps as a server has them: chunks of prompts after contexts of several lengths, and decodes of several rows."""
    draw = random.Random(seed)
    found: list[tuple[bool, list[Row]]] = []
    for _ in range(count):
        if draw.random() < 0.5:
            rows = [(1, draw.randrange(16, 4000), True) for _ in range(draw.randrange(1, 9))]
            found.append((True, rows))
        else:
            rows = [
                (draw.choice((20, 60, 200, 512)), draw.choice((0, 512, 2000)), draw.random() < 0.5)
                for _ in range(draw.randrange(1, 4))
            ]
            found.append((False, rows))
    return found


def steps(
    of: Sequence[tuple[bool, list[Row]]],
    noise: float = 0.0,
    outliers: float = 0.0,
    seed: int = 1,
    **changes: Any,
) -> list[dict[str, Any]]:
    """Lines of these steps, one right after the other. Times are off by `noise` (relative, normal); a part `outliers`
    of them takes three times as long. The machine is the known one with these changes."""
    draw = random.Random(seed)
    hardware, model = json.dumps(machine(step_overhead_s=0.0, **changes)), json.dumps(SERVED)
    now = 1.0
    lines = []
    for decode, rows in of:
        exact = _core.step_seconds(hardware, model, rows, decode)
        took = exact * max(0.1, 1 + noise * draw.gauss(0, 1)) * (3 if draw.random() < outliers else 1)
        lines.append(
            {
                "kind": "decode" if decode else "prefill",
                "at_s": now,
                "rows": len(rows),
                "tokens": sum(tokens for tokens, _, _ in rows),
                "context": sum(context for _, context, _ in rows),
                "pairs": sum(tokens * context + tokens * (tokens + 1) // 2 for tokens, context, _ in rows),
                "sampled": sum(sampled for _, _, sampled in rows),
                "loaded_tokens": 0,
                "busy_s": 0.99 * took,
                "stalled_s": 0.0,
                "rest_s": 0.01 * took,
            }
        )
        now += took + GAP_S
    return lines


def transfers() -> list[dict[str, Any]]:
    """Counters of loads and backups of several sizes over the known link."""
    lines: list[dict[str, Any]] = []
    completed, size = 0, 0
    for count, each in ((1, 1 << 20), (2, 8 << 20), (5, 24 << 20), (1, 24 << 20)):
        completed, size = completed + count, size + count * each
        busy = LINK[0] * completed + size / LINK[1]
        moved = {"completed": completed, "bytes": size, "busy_ns": busy * 1e9}
        none = {"completed": 0, "bytes": 0, "busy_ns": 0}
        looks = {"load": moved, "backup": moved, "spill": none, "prefetch": none}
        lines.append({"kind": "transfers", "at_s": 0.0, **looks})
    return lines


def write(path: Path, *lines: dict[str, Any]) -> Path:
    """A log of these lines."""
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    return path


def write_log(path: Path, count: int = 300, noise: float = 0.0, outliers: float = 0.0) -> Path:
    """A whole log of the known machine."""
    end = {"kind": "end", "left_out": 0}
    return write(path, header(), *steps(shapes(count), noise, outliers), *transfers(), end)
