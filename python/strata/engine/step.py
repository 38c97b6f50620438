"""One plan through the model: arrays in, logits out. A load that fails ends the step and nothing else."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from strata._core import Plan
from strata.engine.device_tier import DeviceTier
from strata.models import CausalLM, ForwardBatch

LOAD_TIMEOUT_S = 30.0
"""Longest wait for one layer; a Mover that is silent for longer has failed, whatever it says later."""

STEP_TIMEOUT_S = 60.0
"""Longest that one step may compute; a device that takes longer hangs, or computes batches that are far too large."""


@dataclass(frozen=True)
class StepOutput:
    """Logits [rows that sample, vocab]; the last hidden states [tokens of the scored rows, hidden_size], in order; the
    seconds that the step waited for loads."""

    logits: torch.Tensor
    scored: torch.Tensor
    stalled_s: float


def forward_batch(plan: Plan, last_tokens: dict[int, int], scored: Sequence[int] = ()) -> ForwardBatch:
    """The model's input. `last_tokens` has the last sampled token of every request whose row needs it. Logits are asked
    for where a row samples, and behind these for every token of the `scored` rows."""
    lengths = plan.query_lengths
    token_ids = plan.token_ids()
    ends = np.cumsum(lengths)
    for request, end in zip(plan.requests, ends, strict=True):
        if token_ids[end - 1] < 0:
            token_ids[end - 1] = last_tokens[request]
    wanted = [ends[np.flatnonzero(plan.samples)] - 1]
    wanted += [np.arange(ends[row] - lengths[row], ends[row]) for row in scored]
    return ForwardBatch(
        token_ids=torch.from_numpy(token_ids),
        positions=torch.from_numpy(plan.positions()),
        query_lengths=lengths,
        context_lengths=plan.context_lengths,
        page_tables=[torch.from_numpy(table) for table in plan.page_tables()],
        slot_mapping=torch.from_numpy(plan.slot_mapping()),
        logits_rows=torch.from_numpy(np.concatenate(wanted)),
    )


def run_step(
    model: CausalLM, tier: DeviceTier, plan: Plan, last_tokens: dict[int, int], scored: Sequence[int] = ()
) -> StepOutput:
    """Runs a plan; `scored` are the rows of which every token's hidden state is wanted. A device of its own may still
    be computing when this returns. Raises LoadFailedError."""
    stalled = 0.0

    def wait_layer(layer: int) -> None:
        nonlocal stalled
        began = time.monotonic()
        try:
            tier.wait_layer(plan, layer, LOAD_TIMEOUT_S)
        finally:
            stalled += time.monotonic() - began

    batch = forward_batch(plan, last_tokens, scored)
    try:
        if not scored:
            logits = model.forward(batch, tier.pool.tensor, wait_layer)
            hidden = logits[:0]
        else:
            # Logits of a whole prompt would not fit into memory: whoever wants them projects a few rows at a time.
            sampling = sum(plan.samples)
            states = model.hidden_states(batch, tier.pool.tensor, wait_layer)
            logits, hidden = model.project_to_vocabulary(states[:sampling]), states[sampling:]
    finally:
        # Also after a failure: what was queued before it still reads and writes pages that Core is about to reuse.
        tier.step_done()
    return StepOutput(logits, hidden, stalled)
