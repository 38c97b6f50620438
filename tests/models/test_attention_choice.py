"""A device gets the first attention that proves itself on it; torch's varlen attention is called by whichever of its
signatures is installed.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import replace
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
    Place,
    ProvenAttention,
    choose_attention,
    decode_seconds,
    default_attention,
    error_of,
    first_quick_enough,
    trial,
)
from strata.models.flashinfer_kernel import FlashInferKernel
from strata.models.flex_kernel import FlexKernel
from strata.models.paged_attention import AttentionBatch, PagedAttention, PlannedAttention
from strata.models.split_attention import Partial, SplitAttention
from strata.models.varlen_kernel import Pages, TorchVarlen, VarlenCall, VarlenKernel

CPU = torch.device("cpu")
CONFIG = ModelConfig(97, 64, 128, layers=2, heads=4, kv_heads=2, head_dim=16, context_length=512)


PLACE = Place(CONFIG, torch.bfloat16, CPU)


def as_fast(attention: PagedAttention, place: Place) -> float:
    """All ways take the same time: nothing is passed over for it, nor asked once one is right."""
    return 1.0


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
    assert choose_attention(PLACE, tried, as_fast) is right
    message = caplog.messages[-1]
    assert "missing: it is not installed" in message and "wrong: off by" in message
    assert "never asked" not in message


def test_plain_serves_where_none_is_right(caplog: pytest.LogCaptureFixture) -> None:
    chosen = choose_attention(PLACE, [("missing", absent), ("off", by(off_by_one_key))], as_fast)
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
    model.attention = ProvenAttention(model.config, torch.float64, CPU, tried, as_fast)
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


def test_kernels_serve_a_windowed_model_until_a_context_outgrows_its_window() -> None:
    """Then plain attention does, for the layers that have a window; a kernel never sees one."""
    kernel = SplitAttention(VarlenKernel(varlen, in_place=True))
    model = tiny_random_model(1, layers=2, windows=(8, None))
    chosen = ProvenAttention(model.config, torch.float64, CPU, [("all", lambda device: kernel)], as_fast)
    model.attention = chosen
    runner = PagedRunner(model, page_size=4, pages=32)
    row = runner.row(list(range(30)))
    planned, found = [], []
    plan = chosen.plan

    def noting(batch: AttentionBatch) -> PlannedAttention:
        result = plan(batch)
        planned.append((batch.window, chosen.name))
        return result

    chosen.plan = noting  # type: ignore[method-assign]
    for count in (8, 12, 1):
        found += runner.step([(row, count)])
    torch.testing.assert_close(torch.cat(found), model.reference_forward(row.tokens)[:21], rtol=0, atol=1e-9)
    in_place = (None, "torch varlen, pages in place")
    assert planned == [in_place, (8, "plain"), in_place, (8, "plain"), in_place]
    batch, _ = trial(PLACE, (1,), (5,))
    with pytest.raises(ModelError, match="knows no sliding window"):
        kernel.plan(replace(batch, window=3))


@pytest.mark.parametrize(
    ("seconds", "place"),
    [([1.0], 0), ([20.0, 1.0], 0), ([20.1, 1.0], 1), ([1.0, 500.0], 0), ([90.0, 30.0, 1.0, 2.0], 2)],
)
def test_the_first_that_is_not_far_slower_than_another_serves(seconds: list[float], place: int) -> None:
    assert first_quick_enough(seconds) == place


@pytest.mark.parametrize(
    ("seconds", "serves", "asked"),
    [
        # Right and no slower than plain attention: nobody else need be compiled.
        ([1.0], 0, 1),
        # Slower than that, but not by far: it serves once the others are known not to be much faster.
        ([9.0, 8.0, 7.0], 0, 3),
        ([30.0, 1.0], 1, 2),
        ([30.0, 9.0, 0.9], 1, 3),
        ([30.0, 29.0, 40.0], 3, 3),
    ],
)
def test_a_way_that_is_right_but_far_slower_is_passed_over(
    seconds: list[float], serves: int, asked: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "strata.models")
    ways: list[PagedAttention] = [by(varlen)(CPU) for _ in seconds]
    measured: list[PagedAttention] = []

    def given(attention: PagedAttention, place: Place) -> float:
        measured.append(attention)
        return seconds[ways.index(attention)] if attention in ways else 1.0

    tried: list[tuple[str, Candidate]] = [
        (str(index), lambda device, way=way: way) for index, way in enumerate(ways)
    ]
    chosen = choose_attention(PLACE, tried, given)
    assert chosen is ways[serves] if serves < len(ways) else isinstance(chosen, PlainAttention)
    assert measured[1:] == ways[:asked]
    for index in range(serves):
        assert f"right, but a decode step takes it {seconds[index] * 1e3:.3g} ms" in caplog.messages[-1]


def test_a_decode_step_is_measured_by_steps_one_token_apart() -> None:
    contexts: list[list[int]] = []

    class Noting(PlainAttention):
        def plan(self, batch: AttentionBatch) -> PlannedAttention:
            contexts.append(list(batch.context_lengths))
            return super().plan(batch)

    assert decode_seconds(Noting(), PLACE) > 0
    assert contexts == [[2000, 300, 40], [2001, 301, 41], [2002, 302, 42]]


def short_rows_alone(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any) -> Partial:
    """Does without a row's keys after the 8,000th."""
    if rest[-1] is None:
        return varlen(query, key, value, *rest)
    used = rest[-1].used.clamp(max=8000)
    return varlen(query, key, value, *rest[:-1], Pages(rest[-1].table, used))


def low_pages_alone(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any) -> Partial:
    """Reckons with page ids of 15 bits."""
    if rest[-1] is None:
        return varlen(query, key, value, *rest)
    return varlen(query, key, value, *rest[:-1], Pages(rest[-1].table & 0x7FFF, rest[-1].used))


def test_a_way_that_fails_with_long_contexts_is_found_out() -> None:
    assert (
        error_of(SplitAttention(VarlenKernel(short_rows_alone, in_place=True)), PLACE)
        > attention_choice.TOLERANCE
    )


def test_a_way_that_fails_with_the_last_pages_of_a_large_pool_is_found_out() -> None:
    """The trial knows how large the pool is that the batch comes with."""
    tried: list[tuple[str, Candidate]] = [
        ("low", lambda device: SplitAttention(VarlenKernel(low_pages_alone, in_place=True))),
        ("all", by(varlen)),
    ]
    for pages, name in ((32768, "torch varlen, pages in place"), (70000, "torch varlen, pages gathered")):
        chosen = ProvenAttention(CONFIG, torch.bfloat16, CPU, tried, as_fast)
        batch, _ = trial(replace(PLACE, page_size=1), (1,), (5,), pages)
        chosen.plan(batch)
        assert chosen.name == name


def test_memory_that_runs_out_is_no_wrong_kernel(caplog: pytest.LogCaptureFixture) -> None:
    def greedy(query: torch.Tensor, *rest: Any) -> Partial:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nmore lines")

    caplog.set_level(logging.INFO, "strata.models")
    tried: list[tuple[str, Candidate]] = [("greedy", by(greedy)), ("next", by(varlen))]
    assert choose_attention(PLACE, tried, as_fast).name == "torch varlen, pages gathered"
    warning, choice = caplog.records
    assert warning.levelno == logging.WARNING and "Tried to allocate 2.00 GiB" in warning.getMessage()
    assert (
        "give a smaller --device-memory" in warning.getMessage() and "more lines" not in warning.getMessage()
    )
    assert "greedy: out of memory" in choice.getMessage()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_right_ways_are_far_within_the_tolerance_and_wrong_ones_far_outside(dtype: torch.dtype) -> None:
    ways: list[PagedAttention] = [PlainAttention(), SplitAttention(FlexKernel(CPU)), by(varlen)(CPU)]
    place = replace(PLACE, dtype=dtype)
    assert max(error_of(way, place) for way in ways) < attention_choice.TOLERANCE / 2
    assert error_of(by(off_by_one_key)(CPU), place) > 10 * attention_choice.TOLERANCE


def test_a_nan_is_wrong() -> None:
    def nan(query: torch.Tensor, *rest: Any) -> Partial:
        output, logsumexp = varlen(query, *rest)
        return output * float("nan"), logsumexp

    assert error_of(by(nan)(CPU), PLACE) == float("inf")


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
        assert error_of(attention, replace(PLACE, dtype=torch.float32)) < 1e-5


def test_the_installed_torch_has_a_signature_that_is_known() -> None:
    try:
        call = TorchVarlen()
    except ModelError as error:
        assert "it came with 2.10" in str(error)
        return
    assert {"return_aux"} <= call._known and {"is_causal", "window_size"} & call._known
