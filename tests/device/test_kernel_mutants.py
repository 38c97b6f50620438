"""The tests of the kernels can fail: each of these mistakes, built into the source, is found by its checker."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from transfer_case import Case, defects_far_out

from strata.device.cpu_kernels import ENTRY, CpuKernels
from strata.device.kernel_source import bundle
from strata.device.kernels import KINDS, Layout

# Strides and pieces pairwise different and with gaps, base other than 0, pieces of several words of each width, more
# words than two batches of the grid below.
DEVICE = Layout(96, 7040, 3472, 480, 432)
HOST = Layout(32, 944, 464, 2912, 432)
THREADS = 100
QUICKLY = ("-O0",)

CASES = [
    Case(
        kind,
        3,
        2,
        DEVICE,
        HOST,
        (5, 0, 3, 6),
        (2, 4, 1, 0),
        (7, 6),
        word=word,  # type: ignore[arg-type]
        index_bits=index_bits,  # type: ignore[arg-type]
        layer=1,
        threads=THREADS,
    )
    for kind in KINDS
    for word, index_bits in ((16, 32), (8, 64), (4, 32))
]

LAYER, PART, PAGE = (
    "(strata_u64)layer * layout.layer_stride",
    "(strata_u64)part * layout.part_stride",
    "(strata_u64)page * layout.page_stride",
)
# What the source says, and what the mutant says instead
MUTANTS = {
    "the layer by the part's stride": (LAYER, "(strata_u64)layer * layout.part_stride"),
    "the part by the layer's stride": (PART, "(strata_u64)part * layout.layer_stride"),
    "the page by the piece's size": (PAGE, "(strata_u64)page * layout.piece_bytes"),
    "the page after": (PAGE, "((strata_u64)page + 1) * layout.page_stride"),
    "part dropped": (f" + {PART} +", " +"),
    "layer dropped": (f" + {LAYER}", ""),
    "base dropped": ("return layout.base + ", "return "),
    "the layer's offset in 32 bits": (LAYER, "layer * (strata_u32)layout.layer_stride"),
    "the part's offset in 32 bits": (PART, "part * (strata_u32)layout.part_stride"),
    "the page's offset in 32 bits": (PAGE, "page * (strata_u32)layout.page_stride"),
    "a word too few": ("layout.piece_bytes / sizeof(Word)", "layout.piece_bytes / sizeof(Word) - 1"),
    "a word too many": ("layout.piece_bytes / sizeof(Word)", "layout.piece_bytes / sizeof(Word) + 1"),
    "first layer dropped": ("first_layer + place.layer", "place.layer"),
    "first layer dropped on one side": (
        "(transfer.destination, transfer.first_layer",
        "(transfer.destination, 0",
    ),
    "always the first page": ("(const Index *)side.pages + place.entry", "(const Index *)side.pages"),
    "the next page id": ("side.pages + place.entry", "side.pages + place.entry + 1"),
    "page ids of 32 bits throughout": ("(const Index *)side.pages", "(const strata_u32 *)side.pages"),
    "no carry into the part": ("step.part + carry", "step.part"),
    "no carry into the layer": ("step.layer + carry", "step.layer"),
    "no carry into the page": ("step.entry + carry", "step.entry"),
    "one word written over and over": ("(to[slot], words[slot])", "(to[slot], words[0])"),
    "a batch written in another order": ("(to[slot], words[slot])", "(to[slot], words[slot ^ 1])"),
    "written where it was read": (
        "to[slot] = strata_find<Word, Index>(transfer.destination",
        "to[slot] = strata_find<Word, Index>(transfer.source",
    ),
    "read where it is written": (
        "STRATA_READ_ONCE((strata_find<Word, Index>(transfer.source",
        "STRATA_READ_ONCE((strata_find<Word, Index>(transfer.destination",
    ),
    "the last round dropped": ("(total - thread - 1) / threads + 1", "(total - thread - 1) / threads"),
    "one round too many": ("(total - thread - 1) / threads + 1", "(total - thread - 1) / threads + 2"),
    "words written twice": (
        "strata_move_batch<Word, Index>(transfer, radix, step, place, (strata_u32)left);",
        "strata_move_batch<Word, Index>(transfer, radix, step, place, (strata_u32)left);\n"
        "    place = strata_place_of(thread, radix);\n"
        "    strata_move_batch<Word, Index>(transfer, radix, step, place, 1);",
    ),
    "the second block does the first one's work": ("blockIdx.x * blockDim.x + threadIdx.x", "threadIdx.x"),
}


def defects(kernels: CpuKernels) -> list[str]:
    found = [defect for case in CASES for defect in case.defects(kernels)]
    return found or defects_far_out(kernels)


def test_the_source_itself_has_no_defect(tmp_path: Path) -> None:
    assert defects(CpuKernels.build(tmp_path, options=QUICKLY)) == []


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_is_found(name: str, tmp_path: Path) -> None:
    says, instead = MUTANTS[name]
    source = bundle(ENTRY)
    assert source.count(says) == 1, "the mutant no longer fits the source"
    assert defects(CpuKernels.build(tmp_path, source.replace(says, instead), QUICKLY)) != []


def test_a_seed_changes_the_order_of_threads(tmp_path: Path) -> None:
    """Where all words go to one place, the last thread wins: another one for another seed."""
    says, instead = "STRATA_WRITE_ONCE(to[slot]", "STRATA_WRITE_ONCE((Word *)transfer.destination.memory"
    source = bundle(ENTRY)
    assert source.count(says) == 1
    kernels = CpuKernels.build(tmp_path, source.replace(says, instead), QUICKLY)
    host = np.arange(6 * HOST.page_stride, dtype=np.uint32).view(np.uint8)
    winners = set()
    for seed in range(1, 9):
        device = np.zeros(16, dtype=np.uint8)
        replace(CASES[0], kind="load_all", seed=seed).run(kernels, device, host)
        winners.add(device.tobytes())
    assert len(winners) > 4
