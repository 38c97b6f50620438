"""The next token from a row of logits. Greedy rows are one argmax; a random row depends on its own seed, position
and logits alone, never on what else is in the batch, so a preempted request goes on with the same text.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from strata.engine.api import SamplingParams


@torch.inference_mode()
def sample_rows(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    seeds: Sequence[int],
    positions: Sequence[int],
    banned: Sequence[frozenset[int]],
) -> list[int]:
    """One token per row of `logits` [R, vocab], on any device. `positions` counts each request's generated tokens;
    `banned` tokens are never chosen, ids outside the vocabulary among them ignored. May change `logits` in place."""
    for row, tokens in enumerate(banned):
        known = [token for token in tokens if 0 <= token < logits.shape[1]]
        if known:
            logits[row, known] = -torch.inf
    greedy: list[int] = logits.argmax(dim=-1).tolist()
    for row, (param, seed, position) in enumerate(zip(params, seeds, positions, strict=True)):
        if param.temperature > 0:
            greedy[row] = _draw(logits[row], param, seed, position)
    return greedy


def _draw(logits: torch.Tensor, params: SamplingParams, seed: int, position: int) -> int:
    scores = logits.to("cpu", torch.float64).numpy()
    # The best score becomes 0 first: a tiny temperature then only sends the others to minus infinity.
    with np.errstate(over="ignore"):
        scores = (scores - scores.max()) / params.temperature
    order = np.argsort(-scores, kind="stable")
    if params.top_k > 0:
        order = order[: params.top_k]
    weights = np.exp(scores[order])
    cumulative = np.cumsum(weights / weights.sum())
    if params.top_p < 1:
        # The token that crosses the threshold is kept, so at least one always is.
        kept = int(np.searchsorted(cumulative, params.top_p)) + 1
        order, cumulative = order[:kept], cumulative[:kept]
    # Philox is counter-based: the draw at a position is the same however the request came to it.
    draw = np.random.Generator(np.random.Philox(key=seed, counter=position)).random() * cumulative[-1]
    return int(order[min(int(np.searchsorted(cumulative, draw, side="right")), len(order) - 1)])
