"""Logits of a small random model on the device, in its serving dtype and over scattered pages, against float32 on the
CPU."""

from __future__ import annotations

import torch

from strata.models import CausalLM, ForwardBatch, pool_shape, tiny_random_model

PAGE_SIZE = 16
CHUNKS = (300, 211, 1, 1)
"""A prompt in two chunks, the second behind cached pages, and two decodes."""
VOCABULARY = 1024


def logits_error(device: str, dtype: torch.dtype, seed: int) -> float:
    """Norm of the error as a share of the reference's norm."""
    tokens = torch.randint(0, VOCABULARY, (sum(CHUNKS),), generator=torch.Generator().manual_seed(seed))
    exact = small_model(seed, torch.float32, "cpu")
    expected = exact.reference_forward(tokens)
    found = paged_logits(small_model(seed, dtype, device), tokens, CHUNKS, seed)
    return float((found - expected).norm() / expected.norm())


def small_model(seed: int, dtype: torch.dtype, device: str) -> CausalLM:
    """A few layers of heads as large as real ones; the same weights everywhere but for their rounding."""
    return tiny_random_model(
        seed, layers=4, heads=8, kv_heads=2, head_dim=64, vocab=VOCABULARY, dtype=dtype, device=device
    )


def paged_logits(model: CausalLM, tokens: torch.Tensor, chunks: tuple[int, ...], seed: int) -> torch.Tensor:
    """Logits [N, vocab] of all tokens, float32 on the CPU; computed chunk by chunk over shuffled pages."""
    pages = 2 * -(-len(tokens) // PAGE_SIZE)
    pool = torch.zeros(pool_shape(model.config, pages, PAGE_SIZE), dtype=model.dtype, device=model.device)
    table = torch.randperm(pages, generator=torch.Generator().manual_seed(seed))[: pages // 2]
    found, start = [], 0
    for count in chunks:
        span = torch.arange(start, start + count)
        batch = ForwardBatch(
            token_ids=tokens[span],
            positions=span,
            query_lengths=[count],
            context_lengths=[start + count],
            page_tables=[table],
            slot_mapping=table[span // PAGE_SIZE] * PAGE_SIZE + span % PAGE_SIZE,
            logits_rows=torch.arange(count),
        )
        found.append(model.forward(batch, pool, lambda layer: None).float().cpu())
        start += count
    return torch.cat(found)
