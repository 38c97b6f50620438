"""The model as an engine holds it, and the fingerprint that its pages carry."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch

from strata.config import ModelOptions
from strata.engine.api import SamplingParams
from strata.engine.validation import check_sampling
from strata.errors import ModelError, RequestError
from strata.models import CausalLM, Tokenizer, fingerprint_files, generation_defaults, load_model

ARITHMETIC = 3
"""Raised whenever a change of `strata.models` rounds K/V differently: pages of both must not be mixed."""


@dataclass(frozen=True)
class ServedModel:
    """`digest` names config and weights; `tokenizer` may be None for library users who only handle token ids.
    `sampling_defaults` are what the server takes for fields that a request leaves out."""

    model: CausalLM
    tokenizer: Tokenizer | None
    name: str
    digest: str
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)

    def fingerprint(self, page_size: int) -> bytes:
        """32 bytes that pages must share to be interchangeable: weights, dtype, record shape, rope, page size,
        shard and arithmetic. Rope is part of the config that `digest` covers; pool sizes are no part of it."""
        config = self.model.config
        fields = {
            "weights": self.digest,
            "dtype": str(self.model.dtype),
            "record": f"page-first layers={config.layers} parts=2 heads={config.kv_heads} dim={config.head_dim}",
            "page_size": str(page_size),
            "shard": "0/1",
            # A GPU rounds otherwise than a CPU.
            "arithmetic": str(ARITHMETIC)
            + ("" if self.model.device.type == "cpu" else f" {self.model.device.type}"),
        }
        digest = hashlib.blake2b(b"strata fingerprint", digest_size=32)
        for name, value in fields.items():
            for part in (name.encode(), value.encode()):
                digest.update(len(part).to_bytes(8, "little") + part)
        return digest.digest()


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def load_served_model(options: ModelOptions) -> ServedModel:
    """Loads `--model`. Raises ModelError with the file and the remedy if it cannot be run."""
    torch.set_num_threads(options.threads or usable_cores())
    automatic = "float32" if options.device == "cpu" else "bfloat16"
    dtype = automatic if options.dtype == "auto" else options.dtype
    loaded = load_model(options.model, dtype, options.device)
    if options.chat_template_date:
        loaded.tokenizer.fix_date(date.fromisoformat(options.chat_template_date))
    defaults = _checked_defaults(loaded.path) if options.generation_config == "auto" else {}
    return ServedModel(loaded.model, loaded.tokenizer, loaded.name, fingerprint_files(loaded.path), defaults)


def _checked_defaults(folder: Path) -> dict[str, float]:
    """Raises ModelError for values that no request may send: each request would fail by them."""
    defaults: dict[str, Any] = generation_defaults(folder)
    try:
        check_sampling(SamplingParams(**defaults), vocabulary=0)
    except RequestError as error:
        raise ModelError(
            f"{folder / 'generation_config.json'}: {error}; repair the file, or leave it aside with "
            "--generation-config none"
        ) from error
    return defaults
