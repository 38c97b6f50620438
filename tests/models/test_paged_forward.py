"""The paged forward equals the plain one in float64, however rows are cut, mixed and scattered over pages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_runner import PagedRunner

from strata.models import ForwardBatch, attention, tiny_random_model, windows

TOLERANCE = 1e-9


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """For tensors this small, waking a second thread costs more than it brings."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tokens_of(seed: int, count: int) -> list[int]:
    return torch.randint(0, 97, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)
    assert found.argmax(-1).tolist() == expected.argmax(-1).tolist()


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("consecutive", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_chunks_equal_the_whole(page_size: int, consecutive: bool, chunk: int) -> None:
    model = tiny_random_model(seed=1)
    tokens = tokens_of(2, 50)
    runner = PagedRunner(model, page_size, pages=128)
    row = runner.row(tokens, consecutive)
    found = []
    while row.computed < len(tokens):
        found += runner.step([(row, min(chunk, len(tokens) - row.computed))])
    assert_same(torch.cat(found), model.reference_forward(tokens))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_mixed_rows_equal_their_references(data: st.DataObject) -> None:
    window = st.sampled_from([None, 1, 2, 5, 16])
    layers = data.draw(st.just(()) | st.tuples(window, window, window))
    model = tiny_random_model(seed=3, windows=layers, query_key_norm=data.draw(st.booleans()))
    page_size = data.draw(st.sampled_from([1, 4, 16]))
    block_bound = data.draw(st.sampled_from([1, 3, windows.BLOCK_TOKENS]))
    # A small bound makes short rows take the roads of long ones: runs read in place, parts merged.
    attention_bound = data.draw(st.sampled_from([1, 8, attention.MINIMUM_RUN_TOKENS]))
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=5))
    runner = PagedRunner(model, page_size, pages=512, seed=data.draw(st.integers(0, 99)))
    rows = [
        runner.row(tokens_of(index, length), data.draw(st.booleans())) for index, length in enumerate(lengths)
    ]
    found: list[list[torch.Tensor]] = [[] for _ in rows]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "MINIMUM_RUN_TOKENS", attention_bound)
        patch.setattr(windows, "BLOCK_TOKENS", block_bound)
        while any(row.computed < len(row.tokens) for row in rows):
            unfinished = [index for index, row in enumerate(rows) if row.computed < len(row.tokens)]
            chosen = data.draw(st.lists(st.sampled_from(unfinished), min_size=1, unique=True))
            rest = {index: len(rows[index].tokens) - rows[index].computed for index in chosen}
            work = [(rows[index], data.draw(st.integers(1, rest[index]))) for index in chosen]
            for index, logits in zip(chosen, runner.step(work), strict=True):
                found[index].append(logits)
    for row, logits in zip(rows, found, strict=True):
        assert_same(torch.cat(logits), model.reference_forward(row.tokens))


def test_long_runs_and_scattered_pages_are_merged() -> None:
    model = tiny_random_model(seed=4, layers=2)
    tokens = tokens_of(5, 2 * attention.MINIMUM_RUN_TOKENS + 300)
    runner = PagedRunner(model, page_size=16, pages=800)
    row = runner.row(tokens, consecutive=True)
    # One run in place, a gap, a second long run in reverse, and a tail of scattered pages.
    row.pages = torch.cat([row.pages[:70], 200 + row.pages[:68].flip(0), torch.tensor([399, 150, 301, 90])])
    row.pages = torch.cat([row.pages, torch.arange(100, 100 + 160 - len(row.pages))])
    found = [runner.step([(row, 900)])[0], runner.step([(row, 900)])[0], runner.step([(row, 1)])[0]]
    found += runner.step([(row, len(tokens) - row.computed)])
    assert_same(torch.cat(found), model.reference_forward(tokens))


@pytest.mark.parametrize("consecutive", [False, True])
def test_a_long_window_over_longer_rows(consecutive: bool) -> None:
    """Several blocks a chunk, masked edges, long runs in place whose ends lie within pages, and decodes of a long
    window."""
    window = attention.MINIMUM_RUN_TOKENS + 77
    model = tiny_random_model(seed=4, layers=2, windows=(window, None))
    tokens = tokens_of(5, 2 * window + 50)
    runner = PagedRunner(model, page_size=16, pages=320)
    row = runner.row(tokens, consecutive)
    found = []
    for count in (700, 900, 1, 1, len(tokens) - 1602):
        found += runner.step([(row, count)])
    assert_same(torch.cat(found), model.reference_forward(tokens))


def test_each_layer_waits_once_in_order_and_after_its_own_projection() -> None:
    model = tiny_random_model(seed=6)
    runner = PagedRunner(model, page_size=4, pages=32)
    row = runner.row(tokens_of(7, 12))
    runner.step([(row, 8)])
    assert runner.waits == [0, 1, 2]
    slot = int(row.pages[2]) * 4
    written: list[tuple[bool, bool]] = []

    def note(layer: int) -> None:
        part = runner.pool[:, 0].flatten(1, 2)[:, slot]
        written.append((not part[layer].isnan().any(), bool(part[layer + 1 :].isnan().all())))

    span = torch.arange(8, 12)
    model.forward(
        ForwardBatch(
            token_ids=torch.tensor(row.tokens[8:]),
            positions=span,
            query_lengths=[4],
            context_lengths=[12],
            page_tables=[row.pages],
            slot_mapping=row.pages[span // 4] * 4 + span % 4,
            logits_rows=torch.tensor([3]),
        ),
        runner.pool,
        note,
    )
    assert written == [(True, True)] * 3


def test_context_loaded_within_the_wait_is_what_attention_reads() -> None:
    """A load may finish as late as in the wait itself: no cached page of a layer is read before."""
    model = tiny_random_model(seed=8)
    tokens = tokens_of(9, 40)
    whole = PagedRunner(model, page_size=4, pages=32)
    row = whole.row(tokens)
    whole.step([(row, 32)])
    kept = whole.pool.clone()
    whole.pool.fill_(float("nan"))

    def load(layer: int) -> None:
        cached = row.pages[:8]
        whole.pool[layer][:, cached] = kept[layer][:, cached]

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
        whole.pool,
        load,
    )
    assert_same(logits, model.reference_forward(tokens)[32:])


def test_no_logits_rows_still_store_every_layer() -> None:
    model = tiny_random_model(seed=10)
    tokens = tokens_of(11, 9)
    runner = PagedRunner(model, page_size=4, pages=8)
    row = runner.row(tokens)
    span = torch.arange(8)
    batch = ForwardBatch(
        token_ids=torch.tensor(tokens[:8]),
        positions=span,
        query_lengths=[8],
        context_lengths=[8],
        page_tables=[row.pages[:2]],
        slot_mapping=row.pages[span // 4] * 4 + span % 4,
        logits_rows=torch.empty(0, dtype=torch.int64),
    )
    assert model.forward(batch, runner.pool, runner.waits.append).shape == (0, 97)
    assert runner.waits == [0, 1, 2]
    row.computed = 8
    assert_same(runner.step([(row, 1)])[0], model.reference_forward(tokens)[8:])


def test_a_failed_wait_ends_the_forward() -> None:
    runner = PagedRunner(tiny_random_model(seed=12), page_size=4, pages=8)
    row = runner.row(tokens_of(13, 8))

    class LoadFailed(Exception):
        pass

    def fail(layer: int) -> None:
        if layer == 1:
            raise LoadFailed

    runner.waits = type("Failing", (list,), {"append": staticmethod(fail)})()
    with pytest.raises(LoadFailed):
        runner.step([(row, 8)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes_run(dtype: torch.dtype) -> None:
    windows = (None, 9, 300)
    model = tiny_random_model(seed=14, dtype=dtype, windows=windows, query_key_norm=True)
    exact = tiny_random_model(seed=14, windows=windows, query_key_norm=True)
    tokens = tokens_of(15, 40)
    runner = PagedRunner(model, page_size=4, pages=32)
    row = runner.row(tokens)
    logits = torch.cat(
        [*runner.step([(row, 20)]), *runner.step([(row, 19)]), *runner.step([(row, 1)])]
    ).double()
    expected = exact.reference_forward(tokens)
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    assert (logits - expected).norm() / expected.norm() < tolerance
