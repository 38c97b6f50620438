"""What a request changes about its logits before a token is chosen: a grammar, bans, bias, penalties, in this order.

All of it depends on the request alone. Penalties are those of vLLM: repetition over the tokens of prompt and answer,
presence and frequency over those of the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from strata.engine.api import SamplingParams


@dataclass(frozen=True)
class Row:
    """What the next token of one request depends on, beside its logits.

    `prompt_tokens` are the distinct ids of the prompt (needed for a repetition penalty alone), `output` the
    tokens of the answer so far: how many they are is the position of the draw. `banned` tokens are never chosen.
    `allowed` is a grammar's mask, bool [vocab]; it outweighs bans.
    """

    params: SamplingParams
    seed: int = 0
    output: Sequence[int] = ()
    prompt_tokens: Sequence[int] | npt.NDArray[np.int64] = ()
    banned: Sequence[int] | npt.NDArray[np.int64] = ()
    allowed: npt.NDArray[np.bool_] | None = None

    @property
    def changes_logits(self) -> bool:
        """Whether `apply_rules` has anything to do."""
        params = self.params
        return (
            len(self.banned) > 0
            or self.allowed is not None
            or bool(params.logit_bias)
            or (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
            != (1.0, 0.0, 0.0)
        )


def apply_rules(logits: torch.Tensor, row: Row) -> None:
    """Changes one row of logits [vocab] in place."""
    params = row.params
    if row.allowed is not None:
        _forbid(logits, np.flatnonzero(~row.allowed))
    else:
        _forbid(logits, row.banned)
    if params.logit_bias:
        ids, values = params.bias_arrays
        added = torch.as_tensor(values, dtype=logits.dtype, device=logits.device)
        logits.index_add_(0, _index(ids, logits), added)
    if params.repetition_penalty != 1.0:
        seen = _index(
            np.union1d(np.asarray(row.prompt_tokens, np.int64), np.asarray(row.output, np.int64)), logits
        )
        scores, penalty = logits[seen], params.repetition_penalty
        logits[seen] = torch.where(scores > 0, scores / penalty, scores * penalty)
    if row.output and (params.presence_penalty or params.frequency_penalty):
        tokens, counts = np.unique(np.asarray(row.output, np.int64), return_counts=True)
        cost = params.presence_penalty + params.frequency_penalty * counts
        logits[_index(tokens, logits)] -= torch.as_tensor(cost, dtype=logits.dtype, device=logits.device)


def _forbid(logits: torch.Tensor, tokens: Sequence[int] | npt.NDArray[np.int64]) -> None:
    if len(tokens):
        logits[_index(tokens, logits)] = -torch.inf


def _index(tokens: Sequence[int] | npt.NDArray[np.int64], logits: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(tokens, dtype=torch.int64, device=logits.device)
