"""An engine of its own that reuses prefixes through Strata: its own torch pool, its own layers, its own loop. Strata
finds what is cached, brings it to the pool layer by layer, and keeps what was computed in host memory and on disk.
"""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import torch

import strata

LAYERS, HEADS, DIM, PAGE, PAGES, VOCABULARY = 4, 2, 16, 8, 32, 100


class Engine:
    """A random transformer in float64. Its pool is `[layer][K or V][page][token][head][dim]`."""

    def __init__(self, disk: Path) -> None:
        random = torch.Generator().manual_seed(0)
        width = HEADS * DIM
        self.embedding = torch.randn(VOCABULARY, width, generator=random, dtype=torch.float64)
        shape = (LAYERS, 4, width, width)
        self.weights = torch.randn(shape, generator=random, dtype=torch.float64) / math.sqrt(width)
        self.pool = torch.zeros(LAYERS, 2, PAGES, PAGE, HEADS, DIM, dtype=torch.float64)
        self.cache = strata.TieredCache(
            self.pool,
            PAGE,
            host_memory="16MiB",
            disk_path=disk,
            disk_capacity="64MiB",
            identity="toy, seed 0",
        )

    def answer(self, tokens: list[int]) -> torch.Tensor:
        """Logits of the last token."""
        with self.cache.match(tokens[:-1]) as match:  # the last token is always computed
            load = match.load()
            start = load.tokens
            tiers = (
                f"{match.on_device} on the device, {match.on_host} in host memory, {match.on_disk} on disk"
            )
            print(f"found {tiers}; computing {len(tokens) - start} of {len(tokens)} tokens")
            fresh = match.reserve(math.ceil(len(tokens) / PAGE) - start // PAGE)
            pages = torch.tensor([*load.pages(), *fresh], dtype=torch.long)
            positions = torch.arange(start, len(tokens))
            at, offset = pages[positions // PAGE], positions % PAGE
            mask = torch.arange(len(tokens)) > positions[:, None]
            hidden = self.embedding[tokens[start:]] + torch.sin(positions[:, None] / 10)
            for layer, (wq, wk, wv, wo) in enumerate(self.weights):
                query, key, value = ((hidden @ w).view(-1, HEADS, DIM) for w in (wq, wk, wv))
                keys, values = self.pool[layer]
                keys[at, offset], values[at, offset] = key, value
                load.wait_layer(layer)  # later layers may still be on their way
                keys, values = (part[pages].flatten(0, 1)[: len(tokens)] for part in (keys, values))
                scores = torch.einsum("qhd,khd->hqk", query, keys) / math.sqrt(DIM)
                scores = scores.masked_fill(mask, -torch.inf).softmax(-1)
                hidden = hidden + torch.einsum("hqk,khd->qhd", scores, values).flatten(1) @ wo
            whole = len(tokens) // PAGE
            match.commit(tokens[: whole * PAGE], fresh[: whole - start // PAGE])
            return self.embedding @ hidden[-1]


def main() -> None:
    tokens = [7 * index % VOCABULARY for index in range(100)]
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(Path(folder))
        answers = [engine.answer(tokens), engine.answer(tokens)]
        engine.cache.demote("device")
        engine.pool.zero_()
        answers.append(engine.answer(tokens))
        engine.cache.close()
        engine = Engine(Path(folder))  # a restart: an empty pool and an empty host tier
        answers.append(engine.answer(tokens))
        engine.cache.close()
    for answer in answers:
        torch.testing.assert_close(answer, answers[0], rtol=1e-9, atol=1e-9)
    print("the same answer each time")


if __name__ == "__main__":
    main()
