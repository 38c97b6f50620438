"""The next token from a row of logits. Greedy rows are one argmax; a random row depends on its own seed, position,
tokens and logits alone, never on what else is in the batch, so a preempted request goes on with the same text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
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
    weights[weights < params.min_p] = 0.0
    if params.top_k > 0 or params.top_p < 1:
        # Sorting a whole vocabulary is the dear part of a draw: only where the rank matters.
        order = np.argsort(-scores, kind="stable")
        kept = params.top_k or len(order)
        if params.top_p < 1:
            # The token that crosses the threshold is kept, so at least one always is.
            shares = np.cumsum(weights[order[:kept]])
            kept = int(np.searchsorted(shares, params.top_p * shares[-1])) + 1
        weights[order[kept:]] = 0.0
    # A race: every token takes an exponential time at the rate of its weight, and the first one wins as often as its
    # share says. Logits that differ in their last bits, as batches of other shapes give, then give the same token.
    times = np.full_like(weights, np.inf)
    np.divide(_noise(seed, position, len(weights)), weights, out=times, where=weights > 0)
    return int(times.argmin())


def _noise(seed: int, position: int, count: int) -> npt.NDArray[np.float64]:
    """Exponential times that only seed and position decide: Philox is counter-based, and positions lie 2**64 apart."""
    generator = np.random.Generator(np.random.Philox(key=seed, counter=position << 64))
    return generator.standard_exponential(count)
