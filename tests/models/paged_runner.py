"""Test help: a pool with shuffled pages, and batches of rows over it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from strata.models import CausalLM, ForwardBatch, pool_shape


@dataclass
class Row:
    """One sequence: its tokens, how many of them are computed, and its page ids."""

    tokens: list[int]
    pages: torch.Tensor
    computed: int = 0


@dataclass
class PagedRunner:
    """Drives a model over a pool whose unwritten slots are NaN, so that reading one shows at once."""

    model: CausalLM
    page_size: int
    pages: int
    seed: int = 0
    waits: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        shape = pool_shape(self.model.config, self.pages, self.page_size)
        self.pool = torch.full(shape, float("nan"), dtype=self.model.dtype)
        # The lower half is handed out in order, the upper half shuffled.
        half = self.pages // 2
        shuffled = half + torch.randperm(
            self.pages - half, generator=torch.Generator().manual_seed(self.seed)
        )
        self._free = {True: torch.arange(half), False: shuffled}

    def row(self, tokens: list[int], consecutive: bool = False) -> Row:
        """A row with pages for all its tokens: shuffled, or in ascending order."""
        count = -(-len(tokens) // self.page_size)
        free = self._free[consecutive]
        assert count <= len(free), "the test's pool is too small"
        self._free[consecutive] = free[count:]
        return Row(tokens, free[:count])

    def step(self, work: list[tuple[Row, int]]) -> list[torch.Tensor]:
        """Compute the next n tokens of each (row, n); the logits [n, vocab] of each."""
        parts = [(row, torch.arange(row.computed, row.computed + count)) for row, count in work]
        batch = ForwardBatch(
            token_ids=torch.tensor([row.tokens[i] for row, span in parts for i in span.tolist()]),
            positions=torch.cat([span for _, span in parts]),
            query_lengths=[count for _, count in work],
            context_lengths=[row.computed + count for row, count in work],
            page_tables=[row.pages[: -(-(row.computed + count) // self.page_size)] for row, count in work],
            slot_mapping=torch.cat(
                [
                    row.pages[span // self.page_size] * self.page_size + span % self.page_size
                    for row, span in parts
                ]
            ),
            logits_rows=torch.arange(sum(count for _, count in work)),
        )
        logits = self.model.forward(batch, self.pool, self.waits.append)
        for row, count in work:
            row.computed += count
        return list(logits.split([count for _, count in work]))
