"""How a model turns positions into rotary angles: frequencies of each pair, and a factor on cosine and sine.

The kinds of scaling are computed as `transformers` computes them; any other kind is refused with a `ModelError`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from strata.errors import ModelError

KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched by ``factor``; ``kind`` is "linear", "llama3" or "yarn".

    llama3: wavelengths that turn less than ``low_frequency_factor`` times within ``original_context_length`` are
    stretched, those that turn more than ``high_frequency_factor`` times kept, those between blended.
    yarn: the same between ``slow_turns`` and ``fast_turns``, blended by the pair's index; cosine and sine are
    multiplied with ``attention_factor``; ``whole_pairs`` rounds the blend's bounds to whole pairs.
    """

    kind: str
    factor: float
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_context_length: int = 8192
    fast_turns: float = 32.0
    slow_turns: float = 1.0
    attention_factor: float = 1.0
    whole_pairs: bool = True


def rope_frequencies(
    theta: float, head_dim: int, scaling: RopeScaling | None, dtype: torch.dtype
) -> torch.Tensor:
    """Angle per position of each rotary pair, [head_dim / 2], with the scaling applied."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(dtype) / head_dim
    frequencies = 1.0 / (theta**exponents)
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    kept = (
        _kept_by_wavelength(frequencies, scaling)
        if scaling.kind == "llama3"
        else _kept_by_index(theta, head_dim, scaling, dtype)
    )
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


def _kept_by_wavelength(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """llama3: the share of each frequency that stays as it is."""
    turns = scaling.original_context_length / (2 * math.pi / frequencies)
    span = scaling.high_frequency_factor - scaling.low_frequency_factor
    return ((turns - scaling.low_frequency_factor) / span).clamp(0.0, 1.0)


def _kept_by_index(theta: float, head_dim: int, scaling: RopeScaling, dtype: torch.dtype) -> torch.Tensor:
    """yarn: the share of each frequency that stays as it is."""

    def pair_that_turns(turns: float) -> float:
        wavelength = scaling.original_context_length / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(theta))

    low, high = pair_that_turns(scaling.fast_turns), pair_that_turns(scaling.slow_turns)
    if scaling.whole_pairs:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    pairs = torch.arange(head_dim // 2, dtype=dtype)
    return 1 - ((pairs - low) / (high - low)).clamp(0.0, 1.0)


def parse_rope_scaling(rope: Mapping[str, Any], context_length: int, where: str) -> RopeScaling | None:
    """What ``rope_parameters`` (older folders: ``rope_scaling``) of a config.json say; raises `ModelError`, and
    KeyError for a key that the kind needs."""
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise ModelError(f"{where}: rope parameters that differ by kind of layer are not supported")
    share = float(rope.get("partial_rotary_factor") or 1.0)
    if share != 1.0:
        raise ModelError(
            f"{where}: partial_rotary_factor {share:g} is not supported; every pair of a head is turned"
        )
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", float(rope["factor"]))
    if kind == "llama3":
        return RopeScaling(
            "llama3",
            float(rope["factor"]),
            float(rope["low_freq_factor"]),
            float(rope["high_freq_factor"]),
            int(rope.get("original_max_position_embeddings") or context_length),
        )
    if kind == "yarn":
        return _parse_yarn(rope, context_length)
    raise ModelError(f"{where}: rope type {kind!r} is not supported; known are {', '.join(KINDS)}")


def _parse_yarn(rope: Mapping[str, Any], context_length: int) -> RopeScaling:
    original = int(rope.get("original_max_position_embeddings") or context_length)
    factor = float(rope["factor"] or context_length / original)
    attention = rope.get("attention_factor")
    if attention is None:
        one, other = rope.get("mscale"), rope.get("mscale_all_dim")
        attention = (
            _yarn_scale(factor, one) / _yarn_scale(factor, other) if one and other else _yarn_scale(factor)
        )
    return RopeScaling(
        "yarn",
        factor,
        original_context_length=original,
        fast_turns=float(rope.get("beta_fast") or 32),
        slow_turns=float(rope.get("beta_slow") or 1),
        attention_factor=float(attention),
        whole_pairs=bool(rope.get("truncate", True)),
    )


def _yarn_scale(factor: float, weight: float = 1.0) -> float:
    """YaRN's temperature of attention, as a factor on cosine and sine."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
