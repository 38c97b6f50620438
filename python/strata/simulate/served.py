"""What the first line of a step log says of its server, in the simulator's words: the model as it ran, the tiers'
pages, and the settings by which Core decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from strata.errors import ConfigError
from strata.simulate.step_log import StepLog

COPY = "threads"
"""The way of copying that a profile has."""
SERVED = "served"
"""The name of the logged server's model and settings in the table."""
_CACHE_FIELDS = (
    "page_size",
    "write_policy",
    "disk_write_policy",
    "selective_accesses",
    "prefetch_policy",
    "prefetch_timeout_s",
    "prefetch_timeout_per_1k_s",
    "prefetch_share",
)
_SCHEDULER_FIELDS = (
    "policy",
    "load_ratio",
    "deferral_tokens",
    "deferral_factor",
    "early_share",
    "max_wait_s",
    "outstanding_plans",
    "batch_tokens",
    "max_running",
    "max_decode_stall_ms",
)


def server_overrides(log: StepLog) -> dict[str, Any]:
    """What `configure(name, SERVED, SERVED, ..)` takes as overrides, so that Core has what it had in the server that
    wrote the log, and decides as it did. Raises ConfigError if the first line lacks a setting."""
    try:
        return _overrides(log.header["settings"], log.header["pages"])
    except (KeyError, TypeError) as error:
        raise ConfigError(f"--log: the first line lacks {error}; write it anew with --step-log") from error


def _overrides(settings: Mapping[str, Any], pages: Mapping[str, Any]) -> dict[str, Any]:
    cache, scheduler = settings["cache"], settings["scheduler"]
    off = [part.strip() for part in str(scheduler["scheduler_off"]).split(",") if part.strip()]
    taken = {
        **{name: cache[name] for name in _CACHE_FIELDS},
        **{name: scheduler[name] for name in _SCHEDULER_FIELDS},
        "always_loads": cache["load_policy"] == "always",
        "scheduler_off": off,
        "copy": COPY,
        "hierarchy": bool(pages["host"] or pages["disk"]),
        "disk": bool(pages["disk"]),
    }
    return {
        "system": taken,
        "pages": [int(pages[tier]) for tier in ("device", "host", "disk")],
        "limited_answers": True,
    }


def as_served(model: Mapping[str, Any], header: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the dtypes that ran. Raises ConfigError if it is another model's, or has experts."""
    try:
        ran, dtype = header["model"], str(header["dtype"])
        page_bytes, page_size = float(header["page_bytes"]), int(header["settings"]["cache"]["page_size"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"--log: the first line lacks {error}; write it anew with --step-log") from error
    for field, key in (("num_hidden_layers", "layers"), ("hidden_size", "hidden_size")):
        if model.get(field) != ran.get(key):
            raise ConfigError(
                f"--model has {field} {model.get(field)}, and the log is of {ran.get('name')} with {ran.get(key)}; "
                "give the folder of the model that was served"
            )
    if any(model.get(name) for name in ("n_routed_experts", "num_local_experts")):
        raise ConfigError(
            "--model has experts, and what their steps read is no sum: only dense models can be fitted"
        )
    heads = int(model["num_attention_heads"])
    width = int(model.get("head_dim") or int(model["hidden_size"]) // heads)
    token_bytes = page_bytes / page_size / int(model["num_hidden_layers"])
    numbers = 2 * int(model.get("num_key_value_heads") or heads) * width
    kept = {2: "float16", 4: "float32", 8: "float64"}.get(round(token_bytes / numbers))
    if kept is None:
        raise ConfigError(
            f"--model keeps {numbers} numbers a token and layer, and the log's pages have {token_bytes:g} bytes for "
            "them; give the folder of the model that was served"
        )
    return {**model, "torch_dtype": dtype, "kv_cache_dtype": kept}
