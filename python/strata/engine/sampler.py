"""The next token from a row of logits. Greedy rows are one argmax; a random row depends on its own seed, position,
tokens and logits alone, never on what else is in the batch, so a preempted request goes on with the same text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from strata.engine.api import SamplingParams, TokenLogprob
from strata.engine.logit_rules import Row, apply_rules
from strata.engine.logprobs import token_logprobs


@dataclass(frozen=True)
class Sampled:
    """A chosen token; `logprob` if its request asked for it."""

    token_id: int
    logprob: TokenLogprob | None = None


@torch.inference_mode()
def sample_rows(logits: torch.Tensor, rows: Sequence[Row]) -> list[Sampled]:
    """One token per row of `logits` [R, vocab], on any device. May change `logits` in place."""
    untouched = {
        index: logits[index].clone() for index, row in enumerate(rows) if row.params.logprobs is not None
    }
    for index, row in enumerate(rows):
        if row.changes_logits:
            apply_rules(logits[index], row)
    tokens: list[int] = logits.argmax(dim=-1).tolist()
    for index, row in enumerate(rows):
        if row.params.temperature > 0:
            tokens[index] = _draw(logits[index], row.params, row.seed, len(row.output))
    sampled = [Sampled(token) for token in tokens]
    for index, raw in untouched.items():
        count = rows[index].params.logprobs or 0
        sampled[index] = Sampled(tokens[index], token_logprobs(raw[None], [tokens[index]], count)[0])
    return sampled


def _draw(logits: torch.Tensor, params: SamplingParams, seed: int, position: int) -> int:
    scores = logits.to("cpu", torch.float64).numpy()
    best = scores.max()
    if not np.isfinite(best):
        return int(scores.argmax())  # every token is banned: there is nothing to draw from
    # The best score becomes 0 first: a tiny temperature then only sends the others to minus infinity.
    with np.errstate(over="ignore"):
        scores = (scores - best) / params.temperature
    weights = np.exp(scores)
    if params.min_p > 0:
        weights[weights < params.min_p] = 0.0
    order = None
    if params.top_k > 0 or params.top_p < 1:
        # Sorting a whole vocabulary is the dear part of a draw: only where the rank matters.
        order = np.argsort(-scores, kind="stable")
        if params.top_k > 0:
            order = order[: params.top_k]
        weights = weights[order]
    cumulative = np.cumsum(weights / weights.sum())
    if params.top_p < 1:
        # The token that crosses the threshold is kept, so at least one always is.
        cumulative = cumulative[: int(np.searchsorted(cumulative, params.top_p)) + 1]
    # Philox is counter-based: the draw at a position is the same however the request came to it.
    draw = np.random.Generator(np.random.Philox(key=seed, counter=position)).random() * cumulative[-1]
    # Where rounding takes the draw to the very end, the last token that has any weight is meant.
    last = int(np.searchsorted(cumulative, cumulative[-1]))
    place = min(int(np.searchsorted(cumulative, draw, side="right")), last)
    return int(order[place]) if order is not None else place
