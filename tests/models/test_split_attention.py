"""The GPU's ways of attention on a CPU: the same plans, tables and merges over plain stand-ins for the kernels, and
flex attention itself, equal the reference in whatever way rows are cut, mixed and scattered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_runner import PagedRunner
from plain_kernels import flashinfer, varlen

from strata.models import CausalLM, ForwardBatch, tiny_random_model, varlen_kernel
from strata.models.attention import PlainAttention
from strata.models.flashinfer_kernel import FlashInferKernel
from strata.models.flex_kernel import FlexKernel
from strata.models.paged_attention import PagedAttention
from strata.models.split_attention import Partial, SplitAttention, merge
from strata.models.staging import pack, to_device, unpack
from strata.models.varlen_kernel import VarlenKernel, ends, token_slots

CPU = torch.device("cpu")
KERNELS: dict[str, Callable[[], PagedAttention]] = {
    "gathered": lambda: SplitAttention(VarlenKernel(varlen, in_place=False)),
    "in place": lambda: SplitAttention(VarlenKernel(varlen, in_place=True)),
    "flex": lambda: SplitAttention(FlexKernel(CPU)),
    "flashinfer": lambda: SplitAttention(FlashInferKernel(CPU, flashinfer)),
}
TOLERANCE = 1e-9


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def model_with(name: str, seed: int = 1, **shape: int) -> CausalLM:
    model = tiny_random_model(seed, **shape)
    model.attention = KERNELS[name]()
    return model


def runner_of(name: str, model: CausalLM, page_size: int, pages: int, seed: int = 0) -> PagedRunner:
    runner = PagedRunner(model, page_size, pages, seed)
    if name == "flex":
        # It multiplies what it masks by 0, so a pool for it starts as zeros.
        runner.pool.zero_()
    return runner


def tokens_of(seed: int, count: int) -> list[int]:
    return torch.randint(0, 97, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def close(found: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    # Flex attention reckons in float32 whatever it is given.
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4 if name == "flex" else TOLERANCE)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("page_size", [1, 4, 24])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_a_mixed_batch_equals_the_reference(name: str, page_size: int, kv_heads: int) -> None:
    """A chunk from nothing, one behind cached tokens, a first token alone and decodes, in one batch."""
    model = model_with(name, layers=2, kv_heads=kv_heads)
    runner = runner_of(name, model, page_size, pages=2 * -(-400 // page_size))
    rows = [runner.row(tokens_of(seed, length)) for seed, length in enumerate([60, 45, 30, 9, 2])]
    found: list[list[torch.Tensor]] = [[] for _ in rows]
    steps = [{1: 20, 2: 29}, {0: 50, 1: 24, 2: 1, 4: 1}, {0: 9, 1: 1, 3: 9, 4: 1}, {0: 1}]
    for step in steps:
        work = [(rows[index], count) for index, count in step.items()]
        for index, logits in zip(step, runner.step(work), strict=True):
            found[index].append(logits)
    for row, logits in zip(rows, found, strict=True):
        close(torch.cat(logits), model.reference_forward(row.tokens), name)


@pytest.mark.parametrize("name", ["gathered", "in place", "flashinfer"])
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_any_mix_equals_the_reference(name: str, data: st.DataObject) -> None:
    model = model_with(name, seed=3, layers=2)
    page_size = data.draw(st.sampled_from([1, 4, 16]))
    bound = data.draw(st.sampled_from([1, 30, varlen_kernel.GATHERED_TOKENS]))
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=5))
    runner = PagedRunner(model, page_size, pages=512, seed=data.draw(st.integers(0, 99)))
    rows = [runner.row(tokens_of(index, n), data.draw(st.booleans())) for index, n in enumerate(lengths)]
    found: list[list[torch.Tensor]] = [[] for _ in rows]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(varlen_kernel, "GATHERED_TOKENS", bound)
        while any(row.computed < len(row.tokens) for row in rows):
            unfinished = [index for index, row in enumerate(rows) if row.computed < len(row.tokens)]
            chosen = data.draw(st.lists(st.sampled_from(unfinished), min_size=1, unique=True))
            rest = {index: len(rows[index].tokens) - rows[index].computed for index in chosen}
            work = [(rows[index], data.draw(st.integers(1, rest[index]))) for index in chosen]
            for index, logits in zip(chosen, runner.step(work), strict=True):
                found[index].append(logits)
    for row, logits in zip(rows, found, strict=True):
        close(torch.cat(logits), model.reference_forward(row.tokens), name)


@pytest.mark.parametrize("name", KERNELS)
def test_no_cached_page_is_read_before_the_wait(name: str) -> None:
    """Context that arrives within the wait is what attention reads; flex included, whose pool must not be NaN where a
    row sees nothing, so the rest of the pool is zero."""
    model = model_with(name, seed=8)
    tokens = tokens_of(9, 40)
    runner = PagedRunner(model, page_size=4, pages=32)
    row = runner.row(tokens)
    runner.step([(row, 32)])
    kept = runner.pool.nan_to_num(0.0)
    runner.pool.fill_(float("nan"))
    waits: list[int] = []

    def load(layer: int) -> None:
        waits.append(layer)
        written = runner.pool[layer][:, row.pages[8:]].clone()
        runner.pool[layer] = kept[layer]
        runner.pool[layer][:, row.pages[8:]] = written.nan_to_num(0.0)

    span = torch.arange(32, 40)
    logits = model.forward(
        ForwardBatch(
            token_ids=torch.tensor(tokens[32:]),
            positions=span,
            query_lengths=[8],
            context_lengths=[40],
            page_tables=[row.pages],
            slot_mapping=row.pages[span // 4] * 4 + span % 4,
            logits_rows=torch.arange(8),
        ),
        runner.pool,
        load,
    )
    assert waits == [0, 1, 2]
    close(logits, model.reference_forward(tokens)[32:], name)


def test_long_contexts_are_gathered_in_bounded_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def counting(query: torch.Tensor, key: torch.Tensor, *rest: object) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(len(key))
        return varlen(query, key, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(varlen_kernel, "GATHERED_TOKENS", 50)
    model = tiny_random_model(4, layers=1)
    model.attention = SplitAttention(VarlenKernel(counting, in_place=False))
    runner = PagedRunner(model, page_size=4, pages=256)
    rows = [runner.row(tokens_of(seed, 31)) for seed in range(4)] + [runner.row(tokens_of(9, 81))]
    runner.step([(row, len(row.tokens) - 1) for row in rows])
    seen.clear()
    found = runner.step([(row, 1) for row in rows])
    assert seen == [31, 31, 31, 31, 81], "each group holds at most 50 tokens, or one row"
    monkeypatch.setattr(varlen_kernel, "GATHERED_TOKENS", 70)
    seen.clear()
    for row in rows:
        row.computed -= 1
    runner.step([(row, 1) for row in rows])
    assert seen == [62, 62, 81]
    for row, logits in zip(rows, found, strict=True):
        close(logits, model.reference_forward(row.tokens)[-1:], "gathered")


def test_a_step_sends_page_ids_and_no_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes to the device grows with the pages of a context, not with its tokens."""
    sent: list[int] = []

    def noting(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
        sent.append(sum(array.nbytes for array in arrays))
        return to_device(arrays, device)

    model = model_with("gathered", layers=1)
    runner = PagedRunner(model, page_size=16, pages=256)
    row = runner.row(tokens_of(5, 1601))
    runner.step([(row, 1600)])
    monkeypatch.setattr(varlen_kernel, "to_device", noting)
    runner.step([(row, 1)])
    pages, rows = -(-1601 // 16), 1
    # Page ids; where the row ends: queries, tokens, pages; and where no row of its own does.
    assert sent == [4 * (pages + 3 * (rows + 1) + 1)]


@pytest.mark.parametrize("page_size", [1, 16, 24])
@settings(max_examples=30, deadline=None)
@given(rows=st.lists(st.integers(1, 100), min_size=1, max_size=5), seed=st.integers(0, 99))
def test_slots_are_those_of_each_rows_pages(page_size: int, rows: list[int], seed: int) -> None:
    """Of the highest page ids too, whose slots do not fit into 32 bits."""
    draw = np.random.default_rng(seed)
    pages = [draw.integers(0, 2**31, -(-tokens // page_size), np.int64).astype(np.int32) for tokens in rows]
    expected = [
        int(ids[token // page_size]) * page_size + token % page_size
        for ids, tokens in zip(pages, rows, strict=True)
        for token in range(tokens)
    ]
    counts = np.array([len(ids) for ids in pages])
    arrays = [ends(np.array(rows)), ends(counts), np.concatenate(pages)]
    token_ends, page_ends, ids = to_device(arrays, CPU)
    found = token_slots(token_ends, page_ends, ids, sum(rows), page_size)
    assert found.dtype == torch.int64 and found.tolist() == expected


@pytest.mark.parametrize("page_size", [1, 16, 24])
@pytest.mark.parametrize("in_place", [False, True])
def test_decode_steps_within_a_power_of_two_look_alike_to_the_kernel(in_place: bool, page_size: int) -> None:
    """Its plan is built once for all of them, and the answers are the exact ones."""
    asked: list[tuple[int, ...]] = []

    def noting(*arguments: Any) -> Partial:
        query, pages = arguments[0], arguments[-1]
        width = () if pages is None else pages.table.shape
        asked.append((len(query), *arguments[5:7], *width))
        return varlen(*arguments)

    model = tiny_random_model(11, layers=1)
    model.attention = SplitAttention(VarlenKernel(noting, in_place))
    runner = PagedRunner(model, page_size, pages=512)
    rows = [runner.row(tokens_of(1, 96)), runner.row(tokens_of(2, 70))]
    runner.step([(rows[0], 72), (rows[1], 46)])
    asked.clear()
    found = [runner.step([(row, 1) for row in rows]) for _ in range(24)]
    assert len(asked) == 24 and len(set(asked)) == 1, asked
    for index, row in enumerate(rows):
        logits = torch.cat([step[index] for step in found])
        close(logits, model.reference_forward(row.tokens)[-24:], "varlen")


@pytest.mark.parametrize("name", ["gathered", "in place", "flex"])
def test_bfloat16_stays_near_float64(name: str) -> None:
    """Kernels in bfloat16, everything around them in float32: as near as the plain way is."""
    exact, tokens = tiny_random_model(seed=14), tokens_of(15, 40)
    expected = exact.reference_forward(tokens)
    errors = {}
    for way, attention in (("plain", PlainAttention()), (name, KERNELS[name]())):
        model = tiny_random_model(seed=14, dtype=torch.bfloat16)
        model.attention = attention
        runner = PagedRunner(model, page_size=4, pages=32)
        runner.pool.zero_()
        row = runner.row(tokens)
        logits = torch.cat([part for count in (20, 19, 1) for part in runner.step([(row, count)])])
        assert logits.dtype == torch.float32
        errors[way] = float((logits - expected).norm() / expected.norm())
    assert errors[name] < 0.1 and errors[name] < 2 * errors["plain"], errors


def test_merged_parts_are_the_attention_over_the_union() -> None:
    generator = torch.Generator().manual_seed(0)
    scores, values = torch.randn(5, 3, 12, generator=generator), torch.randn(5, 3, 12, 8, generator=generator)

    def over(keys: slice) -> tuple[torch.Tensor, torch.Tensor]:
        part = scores[..., keys]
        return (part.softmax(-1).unsqueeze(-1) * values[:, :, keys]).sum(-2), part.logsumexp(-1)

    output, logsumexp = merge(over(slice(0, 5)), over(slice(5, 12)))
    whole = over(slice(None))
    torch.testing.assert_close(output, whole[0])
    torch.testing.assert_close(logsumexp, whole[1])
    nothing = torch.zeros_like(whole[0]), torch.full_like(whole[1], float("-inf"))
    assert torch.equal(merge(nothing, whole)[0], whole[0])


def test_staged_arrays_keep_values_shapes_and_dtypes() -> None:
    arrays = [
        np.arange(5, dtype=np.int64),
        np.empty((0, 3), np.int32),
        np.arange(7, dtype=np.int32).reshape(1, 7),
        np.array([1.5], np.float32),
    ]
    packed, places = pack(arrays)
    for found in (unpack(torch.from_numpy(packed), arrays, places), to_device(arrays, CPU)):
        for tensor, array in zip(found, arrays, strict=True):
            assert tensor.shape == array.shape and torch.equal(tensor, torch.from_numpy(array))
            assert tensor.dtype == torch.from_numpy(array).dtype
