"""The kernels' source, built by the C++ compiler, moves exactly the bytes that numpy says; guards stay untouched."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transfer_case import Case, defects_far_out

from strata.device.cpu_kernels import CpuKernels
from strata.device.kernels import (
    BACKUP_BLOCKS,
    KINDS,
    LOAD_BLOCKS,
    THREADS,
    TRANSFER,
    Layout,
    arguments,
    kernel_names,
    word_bytes,
)
from strata.errors import ConfigError


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> CpuKernels:
    strictly = ("-O2", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas")
    return CpuKernels.build(tmp_path_factory.mktemp("kernels"), options=strictly)


@st.composite
def nested(draw: st.DrawFn, layers: int, parts: int, pages: int, piece: int, grain: int) -> Layout:
    """A layout with layer, part and page nested in any order and a gap at each step, so that its strides and the piece
    are pairwise different."""
    strides = {}
    extent = piece
    for name, size in draw(st.permutations([("layer", layers), ("part", parts), ("page", pages)])):
        strides[name] = extent + grain * draw(st.integers(1, 5))
        extent = strides[name] * size
    base = grain * draw(st.integers(0, 9))
    layout = Layout(base, strides["layer"], strides["part"], strides["page"], piece)
    assert len({*strides.values(), piece}) == 4
    return layout


@st.composite
def cases(draw: st.DrawFn) -> Case:
    layers, parts = draw(st.integers(1, 5)), draw(st.integers(1, 2))
    grain = draw(st.sampled_from([4, 8, 16]))
    page_size, token_grains = draw(st.integers(1, 7)), draw(st.integers(1, 24))
    piece = page_size * token_grains * grain
    pools = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    count = draw(st.integers(0, min(pools)))
    pages = [draw(st.permutations(range(pool)))[:count] for pool in pools]
    return Case(
        kind=draw(st.sampled_from(KINDS)),
        layers=layers,
        parts=parts,
        device=draw(nested(layers, parts, pools[0], piece, grain)),
        host=draw(nested(layers, parts, pools[1], piece, grain)),
        device_pages=tuple(pages[0]),
        host_pages=tuple(pages[1]),
        pool_pages=pools,
        word=draw(st.sampled_from([word for word in (4, 8, 16) if word <= grain])),
        index_bits=draw(st.sampled_from([32, 64])),
        layer=draw(st.integers(0, layers - 1)),
        blocks=draw(st.integers(1, 32)),
        threads=draw(st.sampled_from([1, 3, 32, 100, THREADS])),
        seed=draw(st.integers(0, 2**64 - 1)),
        shifts=(grain * draw(st.integers(0, 16 // grain - 1)), grain * draw(st.integers(0, 16 // grain - 1))),
    )


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(case=cases())
def test_any_layout(kernels: CpuKernels, case: Case) -> None:
    assert case.defects(kernels) == []


@pytest.mark.soak
@settings(max_examples=50_000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=cases())
def test_any_layout_at_length(kernels: CpuKernels, case: Case) -> None:
    assert case.defects(kernels) == []


# (parts, page size, bytes of a token in one layer and part)
SHAPES = {
    "MHA: 32 heads of 128 in 2 bytes": (2, 1, 32 * 128 * 2),
    "GQA: 8 heads of 128 in 2 bytes, page 1": (2, 1, 8 * 128 * 2),
    "GQA: 8 heads of 128 in 2 bytes, page 16": (2, 16, 8 * 128 * 2),
    "MLA: a latent of 576 in 2 bytes, page 1": (1, 1, 576 * 2),
    "MLA: a latent of 576 in 2 bytes, page 64": (1, 64, 576 * 2),
    "one word": (2, 1, 4),
    "odd: 3 words of 4 bytes": (2, 3, 4),
    "odd: 5 words of 4 bytes": (1, 1, 20),
    "odd: 3 words of 8 bytes": (2, 1, 24),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_of_models_between_pool_and_arena(kernels: CpuKernels, shape: str, kind: str) -> None:
    parts, page_size, token_bytes = SHAPES[shape]
    piece, layers, pools = page_size * token_bytes, 3, (7, 6)
    device = Layout.layer_first(layers, parts, pools[0], piece)
    host = Layout.page_first(layers, parts, piece, 4096)
    width = word_bytes(4096, 4096, device, host)
    assert width == next(word for word in (16, 8, 4) if piece % word == 0)
    for index_bits, blocks in itertools.product((32, 64), (LOAD_BLOCKS, BACKUP_BLOCKS)):
        case = Case(
            kind,  # type: ignore[arg-type]
            layers,
            parts,
            device,
            host,
            (6, 0, 3, 2),
            (1, 5, 0, 2),
            pools,
            word=width,
            index_bits=index_bits,  # type: ignore[arg-type]
            layer=1,
            blocks=blocks,
        )
        assert case.defects(kernels) == []


@pytest.mark.parametrize("blocks", range(1, 33))
def test_any_quota_moves_everything(kernels: CpuKernels, blocks: int) -> None:
    """More words than a batch of the smallest grid, and no multiple of any grid."""
    device, host = Layout.layer_first(2, 2, 41, 1168), Layout.page_first(2, 2, 1168, 64)
    pages = tuple(range(37))
    case = Case("load_all", 2, 2, device, host, pages, pages[::-1], (41, 37), word=16, blocks=blocks)
    assert case.defects(kernels) == []


@pytest.mark.parametrize("seed", range(1, 9))
def test_the_order_of_threads_does_not_matter(kernels: CpuKernels, seed: int) -> None:
    device, host = Layout.layer_first(3, 2, 12, 60), Layout.page_first(3, 2, 60, 4)
    pages = (3, 9, 0, 11, 5)
    for kind in KINDS:
        case = Case(kind, 3, 2, device, host, pages, pages[::-1], (12, 12), word=4, seed=seed, layer=2)
        assert case.defects(kernels) == []


def test_offsets_beyond_32_bits(kernels: CpuKernels) -> None:
    assert defects_far_out(kernels) == []


def test_the_module_has_every_kernel_that_is_named(kernels: CpuKernels) -> None:
    assert len(set(kernel_names())) == 3 * 3 * 2
    nothing = np.zeros(1, dtype=TRANSFER)
    nothing["parts"] = nothing["layers"] = 1
    nothing["source"]["layout"][:, 4] = 16
    assert [kernels.launch(name, 1, (nothing,)) for name in kernel_names()] == [0] * 18


def test_a_name_that_is_no_kernel_is_refused(kernels: CpuKernels) -> None:
    with pytest.raises(ConfigError, match="no kernel 'strata_load_layer_w32_i32'"):
        kernels.launch("strata_load_layer_w32_i32", 1, (np.zeros(1, dtype=TRANSFER),))


def test_the_argument_has_the_size_that_the_kernels_take() -> None:
    """Two sides of two addresses and a layout of five words, and four 32-bit numbers: nothing is padded."""
    assert TRANSFER.itemsize == 2 * (8 + 8 + 5 * 8) + 4 * 4


def test_layouts_are_those_of_the_tiers() -> None:
    device = Layout.layer_first(3, 2, 5, 28)
    assert device == Layout(0, 2 * 5 * 28, 5 * 28, 28, 28)
    host = Layout.page_first(3, 2, 28, 64)
    assert host == Layout(0, 2 * 28, 28, 192, 28)
    assert device.words().tolist() == [0, 280, 140, 28, 28]
    assert device.words().dtype == np.uint64


@pytest.mark.parametrize("what", ["device address", "host address", "base", "layer", "part", "page", "piece"])
@pytest.mark.parametrize("width", [4, 8])
def test_one_number_that_is_less_aligned_narrows_the_word(what: str, width: int) -> None:
    names = ["base", "layer", "part", "page", "piece"]
    device = Layout(*(1024 + (width if name == what else 0) for name in names))
    other = Layout(*[1024] * 5)
    addresses = (
        4096 + (width if what == "device address" else 0),
        8192 + (width if what == "host address" else 0),
    )
    assert word_bytes(*addresses, device, other) == width
    assert word_bytes(*addresses, other, device) == width
    assert word_bytes(4096, 8192, other, other) == 16


def test_what_no_word_divides_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"words of 4 bytes, but 2 is all that divides.*--page-size"):
        word_bytes(4096, 4096, Layout(0, 60, 30, 6, 6), Layout(0, 60, 30, 6, 6))


@pytest.mark.parametrize(
    ("count", "layer", "parts", "layers"),
    [(-1, 0, 1, 1), (1, 2, 1, 2), (1, -1, 1, 2), (1, 0, 0, 1), (1, 0, 1, 0)],
)
def test_sizes_that_no_kernel_takes_are_refused(count: int, layer: int, parts: int, layers: int) -> None:
    layout = Layout.page_first(1, 1, 16)
    with pytest.raises(
        ConfigError, match=f"no copy of layer {layer} of {layers}, {parts} parts, {count} pages"
    ):
        arguments("load_layer", 0, 0, layout, layout, 0, 0, count, layer, parts, layers)


def test_two_piece_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="one piece size, got 16 and 32"):
        arguments(
            "load_all", 0, 0, Layout.page_first(1, 1, 16), Layout.page_first(1, 1, 32), 0, 0, 1, 0, 1, 1
        )


def test_source_that_does_not_compile_shows_the_compiler_s_words(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"refuses the kernels' source:\n(.|\n)*error"):
        CpuKernels.build(tmp_path, source="this is no C++")


def test_a_missing_compiler_is_named_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(
        ConfigError, match=r"'no-such-compiler'.*install a C\+\+ compiler, or name one in CXX"
    ):
        CpuKernels.build(tmp_path)
