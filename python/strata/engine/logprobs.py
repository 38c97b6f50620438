"""Log probabilities by the model's own distribution: before temperature, penalties, bias, bans and grammars.

They are computed in float32, or float64 where the logits are. What a long prompt needs at a time is a few rows of the
vocabulary, never all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from strata.engine.api import TokenLogprob

_ROWS_AT_A_TIME = 128


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], count: int) -> list[TokenLogprob]:
    """For each row of `logits` [R, vocab], unchanged, its token's log probability and the `count` likeliest."""
    logprobs = logits.log_softmax(dim=-1)
    chosen = (
        logprobs.gather(1, torch.tensor(token_ids, device=logits.device).unsqueeze(1)).squeeze(1).tolist()
    )
    if not count:
        return [TokenLogprob(token, own) for token, own in zip(token_ids, chosen, strict=True)]
    top = logprobs.topk(min(count, logits.shape[1]), dim=-1)
    values, ids = top.values.tolist(), top.indices.tolist()
    return [
        TokenLogprob(token, own, tuple(zip(row_ids, row_values, strict=True)))
        for token, own, row_ids, row_values in zip(token_ids, chosen, ids, values, strict=True)
    ]


@torch.inference_mode()
def hidden_logprobs(
    project: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    token_ids: Sequence[int],
    count: int,
) -> list[TokenLogprob]:
    """As `token_logprobs`, from hidden states [R or more, hidden_size], that `project` turns into logits."""
    found: list[TokenLogprob] = []
    for start in range(0, len(token_ids), _ROWS_AT_A_TIME):
        end = min(start + _ROWS_AT_A_TIME, len(token_ids))
        found += token_logprobs(project(hidden[start:end]), token_ids[start:end], count)
    return found
