"""The yardsticks: `transformers` with SDPA on the same weights, dtype and threads, and bare forwards of
our own model.

Each is as fast as its library lets it be: logits of the last token alone, no sampling, no streaming.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from strata.models import CausalLM, ForwardBatch, pool_shape, resolve_model


class Reference(Protocol):
    """A model that computes prompts from nothing and decodes batches. Times are seconds."""

    label: str

    def prefill(self, token_ids: Sequence[int]) -> tuple[float, int]:
        """Seconds to the first token, and that token."""

    def decode(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> tuple[float, list[list[int]]]:
        """Seconds for `new_tokens` further tokens of every prompt after its first, and all tokens that
        came out. Prompts are of equal length.
        """


def load_reference(model: CausalLM, name: str, from_folder: bool = True) -> Reference:
    """`transformers` where it is installed and the weights come from a folder; else a bare forward of
    our own.
    """
    if from_folder and importlib.util.find_spec("transformers") is not None:
        return TransformersReference(name, model.dtype)
    return BareReference(model)


class TransformersReference:
    """Implements `Reference` with `transformers`: SDPA, its default cache."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        library: Any = importlib.import_module("transformers")
        library.utils.logging.set_verbosity_error()
        library.utils.logging.disable_progress_bar()
        self.label = f"transformers {importlib.metadata.version('transformers')}, SDPA"
        load = library.AutoModelForCausalLM.from_pretrained
        self._model: Any = load(resolve_model(name), attn_implementation="sdpa").to(dtype).eval()
        self._new_cache: Any = library.DynamicCache
        # Newer versions call it `cache` and warn at each use of the older name.
        arguments = inspect.signature(self._model.forward).parameters
        self._cache_argument = "cache" if "cache" in arguments else "past_key_values"

    @torch.inference_mode()
    def prefill(self, token_ids: Sequence[int]) -> tuple[float, int]:
        """Seconds to the first token, and that token."""
        start = time.perf_counter()
        prompt = torch.tensor([token_ids])
        logits = self._model(input_ids=prompt, use_cache=True, logits_to_keep=1).logits
        token = int(logits[0, -1].argmax())
        return time.perf_counter() - start, token

    @torch.inference_mode()
    def decode(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> tuple[float, list[list[int]]]:
        """Seconds for `new_tokens` further tokens of every prompt, and all tokens [prompts, 1 +
        new_tokens].
        """
        cache = {self._cache_argument: self._new_cache()}
        latest = self._next(torch.tensor(prompts), cache)
        steps = [latest]
        start = time.perf_counter()
        for _ in range(new_tokens):
            latest = self._next(latest, cache)
            steps.append(latest)
        seconds = time.perf_counter() - start
        return seconds, torch.cat(steps, dim=1).tolist()

    def _next(self, token_ids: torch.Tensor, cache: dict[str, Any]) -> torch.Tensor:
        """The greedy next token [rows, 1] after `token_ids` [rows, n], whose K and V the cache takes in."""
        output = self._model(input_ids=token_ids, use_cache=True, logits_to_keep=1, **cache)
        return torch.as_tensor(output.logits[:, -1].argmax(-1, keepdim=True))


class BareReference:
    """Implements `Reference` with forwards of our own model over a pool of its own, no engine around them."""

    label = "bare forward of the same model (no transformers)"

    def __init__(self, model: CausalLM) -> None:
        self._model = model

    def prefill(self, token_ids: Sequence[int]) -> tuple[float, int]:
        """Seconds to the first token, and that token."""
        pool = BarePool(self._model, len(token_ids), 1)
        start = time.perf_counter()
        token = int(pool.forward([token_ids], 0).argmax())
        return time.perf_counter() - start, token

    def decode(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> tuple[float, list[list[int]]]:
        """Seconds for `new_tokens` further tokens of every prompt, and all tokens [prompts, 1 +
        new_tokens].
        """
        length = len(prompts[0])
        pool = BarePool(self._model, length + new_tokens, len(prompts))
        steps = [pool.forward(prompts, 0).argmax(-1)]
        start = time.perf_counter()
        for step in range(new_tokens):
            rows = [[int(token)] for token in steps[-1]]
            steps.append(pool.forward(rows, length + step).argmax(-1))
        seconds = time.perf_counter() - start
        return seconds, torch.stack(steps, dim=1).tolist()


class BarePool:
    """A device pool with room for `rows` sequences of `tokens` tokens, each in adjacent pages: the best case.

    Its K and V are random until a forward writes them; what a forward costs does not depend on them.
    """

    PAGE_SIZE = 16

    def __init__(self, model: CausalLM, tokens: int, rows: int) -> None:
        self._model = model
        self._pages = -(-tokens // self.PAGE_SIZE)
        shape = pool_shape(model.config, self._pages * rows, self.PAGE_SIZE)
        self._pool = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(model.dtype)

    def forward(self, rows: Sequence[Sequence[int]], start: int) -> torch.Tensor:
        """Logits [rows, vocab] after computing each row's tokens at position `start` onward."""
        return self._model.forward(self.batch(rows, start), self._pool, lambda _layer: None)

    def batch(self, rows: Sequence[Sequence[int]], start: int) -> ForwardBatch:
        """The step's input, so that a timing can leave making it out."""
        length = len(rows[0])
        positions = torch.arange(start, start + length)
        firsts = [row * self._pages for row in range(len(rows))]
        return ForwardBatch(
            token_ids=torch.tensor([token for row in rows for token in row]),
            positions=positions.repeat(len(rows)),
            query_lengths=[length] * len(rows),
            context_lengths=[start + length] * len(rows),
            page_tables=[torch.arange(first, first + self._pages) for first in firsts],
            slot_mapping=torch.cat([positions + first * self.PAGE_SIZE for first in firsts]),
            logits_rows=torch.arange(1, len(rows) + 1) * length - 1,
        )

    def seconds(self, token_ids: Sequence[int], computed: int) -> float:
        """Seconds of the forward that computes the last `computed` tokens over the context before them."""
        batch = self.batch([token_ids[-computed:]], len(token_ids) - computed)
        start = time.perf_counter()
        self._model.forward(batch, self._pool, lambda _layer: None).argmax()
        return time.perf_counter() - start
