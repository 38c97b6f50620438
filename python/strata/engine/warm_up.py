"""What happens on the engine's thread before the first request: the model's first steps, which must not be paid for by
a client, and a few more, which tell Core what computing costs. What the link to the host costs is known by then; one
line in the log says both.
"""

from __future__ import annotations

import logging
import time

import torch

from strata._core import Runtime
from strata.engine.step_clock import MeasuredStep
from strata.models import CausalLM, ForwardBatch, pool_shape

_log = logging.getLogger("strata.engine")

_LONG = 127
_SHORT = 16
_COLD = ((_LONG, 0), (1, _LONG))
"""Steps, as (tokens, context), that meet thread pools, kernels' first calls and cold weights."""
_MEASURED = ((_SHORT, 0), (_LONG, 0), (1, _LONG))
"""Steps that are measured: two prefills, so that a step's cost and a token's can be told apart, and a decode."""


def first_steps(model: CausalLM, pool: torch.Tensor, page_size: int) -> list[MeasuredStep]:
    """Runs the steps on the thread that will compute, over the last pages of the pool that will serve: what depends on
    its page size and its size is chosen and compiled here. Nobody owns a page yet; a pool that is too small for the
    steps is left alone."""
    count = -(-(_LONG + 1) // page_size)
    if pool.shape[2] < count:
        pool = torch.zeros(pool_shape(model.config, count, page_size), dtype=model.dtype, device=model.device)
    pages = torch.arange(pool.shape[2] - count, pool.shape[2])
    for tokens, context in _COLD:
        _step(model, pool, pages, tokens, context)
    return [
        MeasuredStep(tokens, context, _step(model, pool, pages, tokens, context))
        for tokens, context in _MEASURED
    ]


def _step(model: CausalLM, pool: torch.Tensor, pages: torch.Tensor, tokens: int, context: int) -> float:
    """Seconds of one step."""
    page_size = pool.shape[3]
    positions = torch.arange(context, context + tokens)
    batch = ForwardBatch(
        token_ids=positions % model.config.vocab_size,
        positions=positions,
        query_lengths=[tokens],
        context_lengths=[context + tokens],
        page_tables=[pages],
        slot_mapping=pages[positions // page_size] * page_size + positions % page_size,
        logits_rows=torch.tensor([tokens - 1]),
    )
    began = time.monotonic()
    # To the host and back: a device of its own is still computing when the call returns.
    model.forward(batch, pool, lambda layer: None).cpu()
    return time.monotonic() - began


def warm_up(model: CausalLM, runtime: Runtime, pool: torch.Tensor, page_size: int) -> list[MeasuredStep]:
    """Runs the first steps, tells Core what they took, and says in the log what decisions start from. Returns the steps
    that were measured."""
    steps = first_steps(model, pool, page_size)
    for step in steps:
        runtime.measured(step.tokens, step.context, step.seconds)
    found = [
        f"{'prefill of' if step.tokens > 1 else 'decode after'} {max(step.tokens, step.context)} tokens "
        f"{step.seconds * 1e3:.1f} ms"
        for step in steps
    ]
    link, problem = runtime.measured_link
    if link is not None:
        per_transfer, per_byte = link
        found.append(
            f"host to device {1 / per_byte / 1e6:,.0f} MB/s + {per_transfer * 1e6:.0f} us a transfer"
        )
    _log.info("measured before serving: %s", ", ".join(found))
    if problem is not None:
        _log.warning(
            "the link from host to device could not be measured (%s); it is learnt from its first loads",
            problem,
        )
    return steps
