"""The decoder in plain arithmetic: whole sequence, full score matrix, no pages. The oracle of the tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from strata.models.decoder import CausalLM


@torch.inference_mode()
def reference_logits(model: CausalLM, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [N, vocab_size] for int64 tokens [N] at positions 0..N-1."""
    config = model.config
    count = len(tokens)
    cos, sin = model.rope_table(torch.arange(count, device=tokens.device))
    visible = torch.ones(count, count, dtype=torch.bool, device=tokens.device).tril()
    hidden = model.embed(tokens)
    for index, layer in enumerate(model.layers):
        projected = layer.query_key_value(_norm(hidden, config.rms_norm_eps))
        heads = projected.view(count, -1, config.head_dim)
        query, key, value = heads.split([config.heads, config.kv_heads, config.kv_heads], dim=1)
        if layer.query_key_norm is not None:
            weights = layer.query_key_norm.split([config.heads, config.kv_heads])
            query, key = (
                _norm(part, config.rms_norm_eps) * weight
                for part, weight in zip((query, key), weights, strict=True)
            )
        query, key = _rotated(query, cos, sin), _rotated(key, cos, sin)
        group = config.heads // config.kv_heads
        key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query, key) / config.head_dim**0.5
        window = config.window(index)
        seen = visible if window is None else visible.triu(1 - window)
        shares = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)
        attended = torch.einsum("hqk,khd->qhd", shares, value).reshape(count, -1)
        hidden = hidden + layer.attention_output(attended)
        gate, up = layer.gate_up(_norm(hidden, config.rms_norm_eps)).chunk(2, dim=-1)
        hidden = hidden + layer.down(gate * torch.sigmoid(gate) * up)
    return _norm(hidden, config.rms_norm_eps) * model.final_norm @ model.vocabulary


def _norm(hidden: torch.Tensor, eps: float) -> torch.Tensor:
    return hidden * torch.rsqrt(hidden.pow(2).mean(dim=-1, keepdim=True) + eps)


def _rotated(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = heads.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(heads.dtype)
