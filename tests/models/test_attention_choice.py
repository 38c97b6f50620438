"""A device gets the first attention that proves itself on it; torch's varlen attention is called by whichever of its
signatures is installed.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from paged_runner import PagedRunner
from plain_kernels import varlen

from strata.errors import ModelError
from strata.models import ModelConfig, attention_choice, tiny_random_model
from strata.models.attention import PlainAttention
from strata.models.attention_choice import (
    Candidate,
    ProvenAttention,
    choose_attention,
    default_attention,
    error_of,
)
from strata.models.flashinfer_kernel import FlashInferKernel
from strata.models.flex_kernel import FlexKernel
from strata.models.paged_attention import PagedAttention
from strata.models.split_attention import Partial, SplitAttention
from strata.models.varlen_kernel import Pages, TorchVarlen, VarlenCall, VarlenKernel

CPU = torch.device("cpu")
CONFIG = ModelConfig(97, 64, 128, layers=2, heads=4, kv_heads=2, head_dim=16, context_length=512)


def by(call: VarlenCall) -> Candidate:
    return lambda device: SplitAttention(VarlenKernel(call, in_place=False))


def off_by_one_key(query: torch.Tensor, key: torch.Tensor, *rest: Any) -> Partial:
    return varlen(query, key.roll(1, 0), *rest)


def logarithms_to_base_2(*arguments: Any) -> Partial:
    output, logsumexp = varlen(*arguments)
    return output, logsumexp * 1.442695


def absent(device: torch.device) -> PagedAttention:
    raise ModelError("it is not installed")


@pytest.mark.parametrize("wrong", [off_by_one_key, logarithms_to_base_2])
def test_the_first_that_is_right_serves(wrong: VarlenCall, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "strata.models")
    right = SplitAttention(VarlenKernel(varlen, in_place=True))
    tried: list[tuple[str, Candidate]] = [
        ("missing", absent),
        ("wrong", by(wrong)),
        ("right", lambda device: right),
        ("never asked", absent),
    ]
    assert choose_attention(CONFIG, torch.bfloat16, CPU, 16, tried) is right
    message = caplog.messages[-1]
    assert "missing: it is not installed" in message and "wrong: off by" in message
    assert "never asked" not in message


def test_plain_serves_where_none_is_right(caplog: pytest.LogCaptureFixture) -> None:
    chosen = choose_attention(
        CONFIG, torch.bfloat16, CPU, 16, [("missing", absent), ("off", by(off_by_one_key))]
    )
    assert isinstance(chosen, PlainAttention)
    assert "which is slow" in caplog.messages[-1]


def test_a_cpu_and_float32_are_served_by_plain() -> None:
    assert isinstance(default_attention(CONFIG, torch.bfloat16, CPU), PlainAttention)
    assert isinstance(default_attention(CONFIG, torch.float32, torch.device("cuda")), PlainAttention)
    assert isinstance(default_attention(CONFIG, torch.bfloat16, torch.device("cuda")), ProvenAttention)


def powers_of_two_alone(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any) -> Partial:
    if rest[-1] is not None and key.shape[1] & (key.shape[1] - 1):
        raise RuntimeError("pages of a power of two, please")
    return varlen(query, key, value, *rest)


def test_the_choice_is_made_for_each_page_size() -> None:
    """A kernel that takes some page sizes serves those, and nothing fails with another."""
    tried: list[tuple[str, Candidate]] = [
        ("some", lambda device: SplitAttention(VarlenKernel(powers_of_two_alone, in_place=True))),
        ("all", by(varlen)),
    ]
    model = tiny_random_model(1, layers=1)
    model.attention = ProvenAttention(model.config, torch.float64, CPU, tried)
    names = []
    for page_size in (4, 24, 4):
        runner = PagedRunner(model, page_size, pages=16)
        row = runner.row(list(range(9)))
        found = torch.cat(runner.step([(row, 5)]) + runner.step([(row, 4)]))
        torch.testing.assert_close(found, model.reference_forward(row.tokens), rtol=0, atol=1e-9)
        names.append(model.attention.name)
    assert names == [
        "torch varlen, pages in place",
        "torch varlen, pages gathered",
        "torch varlen, pages in place",
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_right_ways_are_far_within_the_tolerance_and_wrong_ones_far_outside(dtype: torch.dtype) -> None:
    ways: list[PagedAttention] = [PlainAttention(), SplitAttention(FlexKernel(CPU)), by(varlen)(CPU)]
    assert max(error_of(way, CONFIG, dtype, CPU) for way in ways) < attention_choice.TOLERANCE / 2
    assert error_of(by(off_by_one_key)(CPU), CONFIG, dtype, CPU) > 10 * attention_choice.TOLERANCE


def test_a_nan_is_wrong() -> None:
    def nan(query: torch.Tensor, *rest: Any) -> Partial:
        output, logsumexp = varlen(query, *rest)
        return output * float("nan"), logsumexp

    assert error_of(by(nan)(CPU), CONFIG, torch.bfloat16, CPU) == float("inf")


def test_flashinfer_is_named_where_it_is_missing() -> None:
    if "flashinfer" in sys.modules:
        pytest.skip("FlashInfer is installed here, so its absence cannot be shown")
    with pytest.raises(ModelError, match="pip install flashinfer-python"):
        FlashInferKernel(CPU)


def torch_2_10(
    query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int,
    is_causal: bool = False, return_aux: Any = None,
) -> Partial:  # fmt: skip
    output, logsumexp = varlen(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal, 0.25, None)
    return output, logsumexp.t()


def torch_2_11(
    query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int, *,
    return_aux: Any = None, scale: Any = None, window_size: tuple[int, int] = (-1, -1),
) -> Partial:  # fmt: skip
    causal = {(-1, -1): False, (-1, 0): True}[window_size]
    output, logsumexp = varlen(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, causal, scale, None)
    return output, logsumexp.t()


def torch_2_15(
    query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int, *,
    return_aux: Any = None, scale: Any = None, window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False,
    seqused_k: Any = None, block_table: Any = None, num_splits: Any = None,
) -> Partial:  # fmt: skip
    assert enable_gqa, "heads of the trial are grouped"
    causal = {(-1, -1): False, (-1, 0): True}[window_size]
    pages = Pages(block_table, seqused_k) if block_table is not None else None
    output, logsumexp = varlen(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, causal, scale, pages)
    return output, logsumexp.t()


@pytest.mark.parametrize("version", [torch_2_10, torch_2_11, torch_2_15])
def test_each_signature_of_varlen_attention(
    version: Callable[..., Partial], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("torch.nn.attention.varlen")
    module.varlen_attn = version  # type: ignore[attr-defined]
    module.AuxRequest = SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    call = TorchVarlen()
    assert call.takes_pages == (version is torch_2_15)
    for in_place in [False, True] if call.takes_pages else [False]:
        attention = SplitAttention(VarlenKernel(call, in_place))
        assert error_of(attention, CONFIG, torch.float32, CPU) < 1e-5


def test_the_installed_torch_has_a_signature_that_is_known() -> None:
    try:
        call = TorchVarlen()
    except ModelError as error:
        assert "it came with 2.10" in str(error)
        return
    assert {"return_aux"} <= call._known and {"is_causal", "window_size"} & call._known
