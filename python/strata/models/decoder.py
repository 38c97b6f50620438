"""The decoder of Llama, Mistral, Qwen2 and Qwen3, whose K/V live in a paged, layer-first pool that someone else owns.

One forward serves rows of mixed lengths: prefill chunks with or without cached context and decodes. It writes
the new tokens' K (after rope) and V to their slots and waits for a layer's load only when that layer first
reads cached pages. Work nobody asked for is left out: the last layer's output and the vocabulary are computed
for `logits_rows` alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from strata.models.attention_choice import default_attention
from strata.models.config import ModelConfig
from strata.models.paged_attention import AttentionBatch, PagedAttention, PlannedAttention
from strata.models.reference import reference_logits
from strata.models.staging import to_device
from strata.models.weights import WeightDict, expected_shapes

# Half-precision factors, float32 product: on a GPU, in torch 2.8 and newer.
_MM_WIDENS = "dtype" in torch.ops.aten.mm.overloads()


@dataclass(frozen=True)
class ForwardBatch:
    """One step's input: N new tokens in rows, and where in the pool their context lives. Tensors lie in host memory: a
    model moves what its device needs in one copy. All but ``page_tables`` may be on the device already.

    ``token_ids`` and ``positions``: int64 [N].
    ``query_lengths``: new tokens of each row (sum N); ``context_lengths``: its tokens with these included.
    ``page_tables``: for each row, the int64 page ids that cover its context.
    ``slot_mapping``: int64 [N], page * page_size + offset where each new token's K/V are written.
    ``logits_rows``: int64 [R], the tokens (indices into N) whose logits are wanted.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    query_lengths: list[int]
    context_lengths: list[int]
    page_tables: list[torch.Tensor]
    slot_mapping: torch.Tensor
    logits_rows: torch.Tensor


class Weights(Protocol):
    """Where tensors come from, by their Hugging Face name."""

    def get(self, name: str) -> torch.Tensor:
        """The tensor in the model's dtype and on its device."""
        ...


@dataclass(frozen=True)
class Linear:
    """A projection stored as [inputs, outputs]: for few tokens this is up to twice as fast on a CPU."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.bias is None:
            return torch.mm(inputs, self.weight)
        return torch.addmm(self.bias, inputs, self.weight)


@dataclass(frozen=True)
class Layer:
    """Weights of one decoder layer. Projections that read the same input are fused, and the weights of the norm before
    them are part of them: what is left of a norm is one scale a token. ``query_key_norm``: weights
    [heads + kv_heads, head_dim] of the norm of each head's query and key, or None where a model has none."""

    query_key_value: Linear
    query_key_norm: torch.Tensor | None
    attention_output: Linear
    gate_up: Linear
    down: Linear


def pool_shape(config: ModelConfig, pages: int, page_size: int) -> tuple[int, int, int, int, int, int]:
    """Shape of the layer-first pool: (layers, K and V, pages, page_size, kv_heads, head_dim)."""
    return (config.layers, 2, pages, page_size, config.kv_heads, config.head_dim)


class CausalLM:
    """The decoder. It holds weights only; all state is in the pool that each call is given."""

    def __init__(
        self, config: ModelConfig, weights: Weights, attention: PagedAttention | None = None
    ) -> None:
        self.config = config
        # Stored as [hidden, vocab] like every projection; a tied embedding is looked up as columns of it.
        embedding = weights.get("model.embed_tokens.weight")
        self.dtype = embedding.dtype
        self.device = embedding.device
        self.vocabulary = (
            (embedding if config.tie_word_embeddings else weights.get("lm_head.weight")).t().contiguous()
        )
        self._embedding = None if config.tie_word_embeddings else embedding.clone()
        self.layers = [_load_layer(config, weights, index) for index in range(config.layers)]
        self.final_norm = weights.get("model.norm.weight").clone()
        self._scale = 1.0 / math.sqrt(config.head_dim)
        rope_dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        self._rope_frequencies = config.rope_frequencies(rope_dtype).to(self.device)
        self.attention = attention or default_attention(config, self.dtype, self.device)

    @torch.inference_mode()
    def forward(
        self, batch: ForwardBatch, pool: torch.Tensor, wait_layer: Callable[[int], None]
    ) -> torch.Tensor:
        """Logits [R, vocab_size] of ``batch.logits_rows``, float32 or wider, on the model's device. Arguments as for
        `hidden_states`."""
        return self.project_to_vocabulary(self.hidden_states(batch, pool, wait_layer))

    @torch.inference_mode()
    def hidden_states(
        self, batch: ForwardBatch, pool: torch.Tensor, wait_layer: Callable[[int], None]
    ) -> torch.Tensor:
        """What `project_to_vocabulary` turns into logits: the last hidden states [R, hidden_size] of
        ``batch.logits_rows``, in the model's dtype.

        ``pool`` is contiguous, of `pool_shape` and of the model's dtype. ``wait_layer(layer)`` is called once
        a layer, in order, before the layer reads cached context; whatever it raises ends the forward.
        """
        plans = self._plan(batch, pool)
        token_ids, positions, slot_mapping, logits_rows = self._inputs(batch)
        cos, sin = self.rope_table(positions)
        hidden = self.embed(token_ids)
        last = self.config.layers - 1
        for index, layer in enumerate(self.layers):
            cached = pool[index].view(2, -1, self.config.kv_heads, self.config.head_dim)
            query, key, value = self._project(layer, hidden, cos, sin)
            cached[0].index_copy_(0, slot_mapping, key)
            cached[1].index_copy_(0, slot_mapping, value)
            if index == last and not len(logits_rows):
                wait_layer(index)
                return hidden[:0]
            attended = plans[index].attend(query, key, value, cached, partial(wait_layer, index)).flatten(1)
            if index == last:
                attended, hidden = attended[logits_rows], hidden[logits_rows]
            hidden = hidden + layer.attention_output(attended)
            hidden += self._mlp(layer, hidden)
        return hidden

    def reference_forward(self, tokens: list[int] | torch.Tensor) -> torch.Tensor:
        """Logits [N, vocab_size] of a whole sequence in plain arithmetic: the oracle of the tests."""
        return reference_logits(self, torch.as_tensor(tokens, dtype=torch.int64, device=self.device))

    def rope_table(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine [N, 1, head_dim / 2] of each position, float32 or wider."""
        angles = positions.to(self._rope_frequencies.dtype)[:, None, None] * self._rope_frequencies
        factor = self.config.rope_factor
        if factor == 1.0:
            return angles.cos(), angles.sin()
        return angles.cos().mul_(factor), angles.sin().mul_(factor)

    @torch.inference_mode()
    def project_to_vocabulary(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final norm and logits [R, vocab_size] of hidden states [R, hidden_size], float32 or wider."""
        # The vocabulary may be the embedding too, so this norm keeps its weights.
        normed = unit_rms(hidden, self.config.rms_norm_eps).mul_(self.final_norm)
        if self.dtype.itemsize >= 4:
            return torch.mm(normed, self.vocabulary)
        if normed.is_cuda and _MM_WIDENS:
            # Rounded to bfloat16, every second pair of high logits would be a tie.
            return torch.mm(normed, self.vocabulary, out_dtype=torch.float32)
        return torch.mm(normed, self.vocabulary).float()

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Hidden states [N, hidden_size] of token ids [N]."""
        if self._embedding is not None:
            return F.embedding(token_ids, self._embedding)
        return self.vocabulary.index_select(1, token_ids).t().contiguous()

    def _inputs(self, batch: ForwardBatch) -> list[torch.Tensor]:
        """Token ids, positions, slots and rows of logits, on the model's device."""
        parts = [batch.token_ids, batch.positions, batch.slot_mapping, batch.logits_rows]
        if batch.token_ids.device.type == self.device.type:
            return parts
        return to_device([part.numpy() for part in parts], self.device)

    def _plan(self, batch: ForwardBatch, pool: torch.Tensor) -> list[PlannedAttention]:
        """A plan for each layer, made once for all layers of the same window."""
        longest = max(batch.context_lengths)
        plans: dict[int | None, PlannedAttention] = {}
        layers = []
        for index in range(self.config.layers):
            window = self.config.window(index)
            if window is not None and longest <= window:
                window = None
            if window not in plans:
                plans[window] = self._plan_window(batch, pool, window)
            layers.append(plans[window])
        return layers

    def _plan_window(self, batch: ForwardBatch, pool: torch.Tensor, window: int | None) -> PlannedAttention:
        pages, page_size = pool.shape[2:4]
        return self.attention.plan(
            AttentionBatch(
                query_lengths=batch.query_lengths,
                context_lengths=batch.context_lengths,
                page_tables=batch.page_tables,
                page_size=page_size,
                slots=pages * page_size,
                heads=self.config.heads,
                kv_heads=self.config.kv_heads,
                head_dim=self.config.head_dim,
                scale=self._scale,
                dtype=self.dtype,
                device=self.device,
                window=window,
            )
        )

    def _project(
        self, layer: Layer, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query [N, kv_heads, group, head_dim], key and value [N, kv_heads, head_dim], after rope."""
        config = self.config
        normed = unit_rms(hidden, config.rms_norm_eps)
        projected = layer.query_key_value(normed).view(len(hidden), -1, config.head_dim)
        turned = projected[:, : config.heads + config.kv_heads]
        if layer.query_key_norm is not None:
            turned.copy_(unit_rms(turned, config.rms_norm_eps).mul_(layer.query_key_norm))
        rotate(turned, cos, sin)
        query, key, value = projected.split([config.heads, config.kv_heads, config.kv_heads], dim=1)
        return query.unflatten(1, (config.kv_heads, -1)), key, value

    def _mlp(self, layer: Layer, hidden: torch.Tensor) -> torch.Tensor:
        gate, up = layer.gate_up(unit_rms(hidden, self.config.rms_norm_eps)).chunk(2, dim=-1)
        return layer.down(F.silu(gate).mul_(up))


def unit_rms(hidden: torch.Tensor, eps: float) -> torch.Tensor:
    """Each row of [..., size] scaled to a root mean square of one: `F.rms_norm` without weights in two passes over
    the data instead of four. Half-precision rows are measured in float32."""
    wide = torch.float32 if hidden.dtype.itemsize < 4 else hidden.dtype
    square = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True, dtype=wide).square_()
    scale: torch.Tensor = square.div_(hidden.shape[-1]).add_(eps).rsqrt_()
    return (hidden * scale).to(hidden.dtype)


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Apply rotary embeddings in place to [N, heads, head_dim]; pairs are (i, i + head_dim / 2). Reckoned in the dtype
    of ``cos`` and ``sin``, and rounded once."""
    if heads.dtype != cos.dtype:
        wide = heads.to(cos.dtype)
        rotate(wide, cos, sin)
        heads.copy_(wide)
        return
    first, second = heads.chunk(2, dim=-1)
    turned = first * sin
    first.mul_(cos).addcmul_(second, sin, value=-1)
    second.mul_(cos).add_(turned)


def _load_layer(config: ModelConfig, weights: Weights, index: int) -> Layer:
    prefix = f"model.layers.{index}"

    def linear(block: str, names: tuple[str, ...], biased: bool, norm: torch.Tensor | None = None) -> Linear:
        weight = torch.cat([weights.get(f"{prefix}.{block}.{name}.weight") for name in names])
        if norm is not None:
            weight *= norm
        bias = torch.cat([weights.get(f"{prefix}.{block}.{name}.bias") for name in names]) if biased else None
        return Linear(weight.t().contiguous(), bias)

    def norms_of_heads() -> torch.Tensor:
        query, key = (weights.get(f"{prefix}.self_attn.{name}_norm.weight") for name in ("q", "k"))
        return torch.cat([query.expand(config.heads, -1), key.expand(config.kv_heads, -1)])

    before_attention = weights.get(f"{prefix}.input_layernorm.weight")
    before_mlp = weights.get(f"{prefix}.post_attention_layernorm.weight")
    return Layer(
        query_key_value=linear(
            "self_attn", ("q_proj", "k_proj", "v_proj"), config.query_key_value_bias, before_attention
        ),
        query_key_norm=norms_of_heads() if config.query_key_norm else None,
        attention_output=linear("self_attn", ("o_proj",), config.attention_output_bias),
        gate_up=linear("mlp", ("gate_proj", "up_proj"), config.mlp_bias, before_mlp),
        down=linear("mlp", ("down_proj",), config.mlp_bias),
    )


def tiny_random_model(
    seed: int,
    layers: int = 3,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 8,
    vocab: int = 97,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
    **switches: Any,
) -> CausalLM:
    """A small random model whose float64 forward is an exact oracle for tests of paging and scheduling. Weights are the
    same on every device, and in every dtype but for their rounding. ``switches``: further fields of `ModelConfig`."""
    hidden = heads * head_dim
    config = ModelConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        context_length=65536,
        **switches,
    )
    generator = torch.Generator().manual_seed(seed)
    # Wide weights keep the next-token choice away from ties and dependent on the context.
    tensors = {
        name: torch.ones(shape, dtype=dtype)
        if name.endswith("norm.weight")
        else torch.randn(shape, generator=generator, dtype=torch.float64)
        .mul_(2.0 / math.sqrt(shape[-1]))
        .to(dtype)
        for name, shape in expected_shapes(config).items()
    }
    return CausalLM(config, WeightDict(tensors, config, dtype, torch.device(device)))
