"""One plan through the model: arrays in, logits out. A load that fails ends the step and nothing else."""

from __future__ import annotations

import time

import numpy as np
import torch

from strata._core import Plan
from strata.engine.device_tier import DeviceTier
from strata.models import CausalLM, ForwardBatch

LOAD_TIMEOUT_S = 30.0
"""Longest wait for one layer; a Mover that is silent for longer has failed, whatever it says later."""

STEP_TIMEOUT_S = 60.0
"""Longest that one step may compute; a device that takes longer hangs, or computes batches that are far too large."""


def forward_batch(plan: Plan, last_tokens: dict[int, int]) -> ForwardBatch:
    """The model's input. `last_tokens` has the last sampled token of every request whose row needs it."""
    lengths = plan.query_lengths
    token_ids = plan.token_ids()
    ends = np.cumsum(lengths)
    for request, end in zip(plan.requests, ends, strict=True):
        if token_ids[end - 1] < 0:
            token_ids[end - 1] = last_tokens[request]
    samples = np.flatnonzero(plan.samples)
    return ForwardBatch(
        token_ids=torch.from_numpy(token_ids),
        positions=torch.from_numpy(plan.positions()),
        query_lengths=lengths,
        context_lengths=plan.context_lengths,
        page_tables=[torch.from_numpy(table) for table in plan.page_tables()],
        slot_mapping=torch.from_numpy(plan.slot_mapping()),
        logits_rows=torch.from_numpy(ends[samples] - 1),
    )


def run_step(
    model: CausalLM, tier: DeviceTier, plan: Plan, last_tokens: dict[int, int]
) -> tuple[torch.Tensor, float]:
    """Logits [rows that sample, vocab], and the seconds that the step waited for loads. A device of its own may still
    be computing when this returns. Raises LoadFailedError."""
    stalled = 0.0

    def wait_layer(layer: int) -> None:
        nonlocal stalled
        began = time.monotonic()
        try:
            tier.wait_layer(plan, layer, LOAD_TIMEOUT_S)
        finally:
            stalled += time.monotonic() - began

    try:
        logits = model.forward(forward_batch(plan, last_tokens), tier.pool.tensor, wait_layer)
    finally:
        # Also after a failure: what was queued before it still reads and writes pages that Core is about to reuse.
        tier.step_done()
    return logits, stalled
