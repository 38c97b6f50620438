"""OpenAI's usage object, with the tiers that the prompt's tokens came from under `strata`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from strata.engine.api import TokenSources, Usage

_TIMES = ("ttft_s", "queue_s", "prefill_s", "decode_s")
_DIGITS = 6  # of a second: microseconds


def usage_body(prompts: Sequence[Usage], answers: Sequence[Usage]) -> dict[str, Any]:
    """Usage of a request that had these prompts and these answers to them. Tokens and saved seconds are sums; of each
    other time it is the longest of the answers'."""
    sources = TokenSources(
        device=sum(usage.sources.device for usage in prompts),
        host=sum(usage.sources.host for usage in prompts),
        disk=sum(usage.sources.disk for usage in prompts),
        computed=sum(usage.sources.computed for usage in prompts),
    )
    prompt_tokens = sum(usage.prompt_tokens for usage in prompts)
    completion_tokens = sum(usage.completion_tokens for usage in answers)
    return {
        **tokens_so_far(prompt_tokens, completion_tokens),
        "prompt_tokens_details": {"cached_tokens": sources.cached},
        "strata": {
            "device": sources.device,
            "host": sources.host,
            "disk": sources.disk,
            "computed": sources.computed,
            **{name: _longest(answers, name) for name in _TIMES},
            "saved_s": round(sum(usage.saved_s for usage in prompts), _DIGITS),
        },
    }


def tokens_so_far(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """The part of usage that is known before the end."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def _longest(answers: Sequence[Usage], time: str) -> float:
    return round(max((getattr(usage, time) for usage in answers), default=0.0), _DIGITS)
