"""The start-up measurement, on the clock of a fake device, and the policy that reads it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from strata.device import path_trial
from strata.device.cuda import CudaPool
from strata.device.cuda_runtime import DeviceError, KernelCall, Stream
from strata.device.edge import Edge
from strata.device.fake_cuda import FakeCudaRuntime
from strata.device.kernels import BACKUP_BLOCKS, LOAD_BLOCKS, Layout
from strata.device.page_tables import PageTables
from strata.device.path_choice import DIRECTIONS, Measurement, Path, PathChoice, choose
from strata.device.path_trial import measure_paths

ONE, TWO, FOUR, BATCH = Path("kernel", 1), Path("kernel", 2), Path("kernel", 4), Path("batch")


def test_the_fewest_blocks_that_are_as_quick_are_taken() -> None:
    seconds = {ONE: 2.0, TWO: 1.04, FOUR: 1.0}
    choice = choose([Measurement("load", 16, path, took) for path, took in seconds.items()], 2)
    assert choice.of("load", 16) == TWO
    assert choice.of("backup", 16) == Path("kernel", BACKUP_BLOCKS), "what was not measured keeps its default"


@pytest.mark.parametrize(("batch", "wanted"), [(0.95, TWO), (0.89, BATCH)])
def test_the_copy_engine_must_be_clearly_quicker(batch: float, wanted: Path) -> None:
    seconds = {ONE: 2.0, TWO: 1.0, BATCH: batch}
    choice = choose([Measurement("load", 1, path, took) for path, took in seconds.items()], 2)
    assert choice.of("load", 1) == wanted


@pytest.mark.parametrize(
    ("at_once", "wanted"), [(0.051, TWO), (0.049, Path("kernel", 4, whole=True)), (1.0, TWO)]
)
def test_all_layers_go_at_once_where_the_first_would_hardly_come_sooner(at_once: float, wanted: Path) -> None:
    seconds = {
        ONE: 2.0,
        TWO: 0.8,
        BATCH: 0.9,
        replace(BATCH, whole=True): 1.0,
        replace(FOUR, whole=True): at_once,
    }
    choice = choose([Measurement("load", 1, path, took) for path, took in seconds.items()], 32)
    assert choice.of("load", 1) == wanted
    assert ("all layers at once" in str(choice)) is wanted.whole


def test_a_size_takes_the_path_of_the_next_smaller_one_measured() -> None:
    choice = PathChoice(loads=((1, BATCH), (16, ONE), (128, FOUR)))
    chosen = [choice.of("load", pages) for pages in (0, 1, 15, 16, 127, 128, 100_000)]
    assert chosen == [BATCH, BATCH, BATCH, ONE, ONE, FOUR, FOUR]


def test_a_load_goes_at_once_up_to_the_size_that_was_measured() -> None:
    """A path serves larger transfers than the measured one, but not this way."""
    whole = replace(ONE, whole=True)

    def chosen(quick: tuple[int, ...]) -> list[Path]:
        took = [Measurement("load", pages, TWO, 1.0) for pages in (1, 16, 128)]
        took += [Measurement("load", pages, whole, 0.05 if pages in quick else 1.0) for pages in (1, 16, 128)]
        choice = choose(took, 32)
        return [choice.of("load", pages) for pages in (0, 1, 2, 16, 17, 128, 129)]

    assert chosen(()) == [TWO] * 7
    assert chosen((1,)) == [whole, whole, TWO, TWO, TWO, TWO, TWO]
    assert chosen((1, 16)) == [whole, whole, whole, whole, TWO, TWO, TWO]
    assert chosen((16,)) == [TWO, TWO, whole, whole, TWO, TWO, TWO]
    assert chosen((1, 16, 128)) == [whole] * 6 + [TWO]


def measured(runtime: FakeCudaRuntime, pages: int = 300) -> PathChoice:
    """What a measurement over so many pages of eight layers finds."""
    layers, parts, piece = 8, 2, 16
    pool = CudaPool.allocate((layers, parts, pages, piece), torch.uint8, runtime)
    arena = np.zeros(pages * layers * parts * piece, np.uint8)
    runtime.register_host(int(arena.ctypes.data), arena.nbytes)
    edge = Edge(
        device_address=pool.address,
        device_layout=Layout.layer_first(layers, parts, pages, piece),
        device_pages=pages,
        host_address=int(arena.ctypes.data),
        host_layout=Layout.page_first(layers, parts, piece),
        host_pages=pages,
        host_bytes=arena.nbytes,
        layers=layers,
        parts=parts,
    )
    tables = PageTables(runtime, 2, pages)
    tables.prepare()
    stream = runtime.create_stream()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(path_trial, "ROUNDS", 1)  # a fake's clock has no hiccups
        choice = measure_paths(runtime, edge, tables, stream)
    assert len(tables._free) == 2
    return choice


def test_a_link_that_two_blocks_fill() -> None:
    def cost(kind: str, blocks: int, size_bytes: int) -> float:
        if kind == "batch":
            return 7.5e-6 * blocks  # a descriptor a piece
        return 1e-5 + size_bytes / (min(blocks, LOAD_BLOCKS) * 1e6) if kind != "copy" else 0.0

    choice = measured(FakeCudaRuntime(3, cost=cost))
    assert choice.of("load", 128) == Path("kernel", LOAD_BLOCKS)
    assert choice.of("load", 1) == BATCH and choice.of("backup", 1) == BATCH


def test_loads_that_cost_commands_alone_go_at_once() -> None:
    def cost(kind: str, blocks: int, size_bytes: int) -> float:
        return 1e-5 + size_bytes / 1e9 if kind not in ("copy", "batch") else size_bytes / 1e6

    choice = measured(FakeCudaRuntime(3, cost=cost))
    assert choice.of("load", 1) == Path("kernel", 1, whole=True)
    assert choice.of("load", 128) == Path("kernel", 1), "there the first layer would come much later"


def test_large_pieces_go_by_the_copy_engine() -> None:
    choice = measured(FakeCudaRuntime(3, cost=lambda kind, blocks, size: 1e-6 if kind == "batch" else 1e-3))
    assert choice.of("load", 128) == replace(BATCH, whole=True) and choice.of("backup", 5) == BATCH


@pytest.mark.parametrize("fault", [{"batched_copies": False}, {"fail": {"copy_batch": 1}}])
def test_kernels_do_where_there_are_no_batched_copies(fault: dict[str, object]) -> None:
    runtime = FakeCudaRuntime(3, cost=lambda kind, blocks, size: 1e-6 if kind == "batch" else 1e-3, **fault)
    choice = measured(runtime, pages=1)
    assert choice.of("load", 1).kind == "kernel" and runtime.sticky_errors == 0


def test_a_kernel_that_does_not_run_is_an_error() -> None:
    with pytest.raises(DeviceError, match="launch"):
        measured(FakeCudaRuntime(3, fail={"launch": 4}))


def test_a_silent_device_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strata.device.path_trial.SILENCE_S", 0.01)
    runtime = FakeCudaRuntime(3)
    monkeypatch.setattr(runtime, "_let_run", lambda most: None)
    with pytest.raises(DeviceError, match="did not end") as silent:
        measured(runtime)
    assert silent.value.fatal


def test_a_slow_first_transfer_costs_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeCudaRuntime(3)
    clock, seen = [0.0], []
    seldom = {"load_layer", "load_all", "back_up_all"}

    def launch(call: KernelCall, stream: Stream) -> None:
        if call.kind in seldom:  # its first: the driver loads it
            seldom.remove(call.kind)
            clock[0] += 10 * path_trial.LIMIT_S
        FakeCudaRuntime.launch(runtime, call, stream)

    def note(measurements: list[Measurement], layers: int) -> PathChoice:
        seen.extend(measurements)
        return choose(measurements, layers)

    monkeypatch.setattr(runtime, "launch", launch)
    monkeypatch.setattr(path_trial, "choose", note)
    monkeypatch.setattr(path_trial, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    measured(runtime)
    assert not seldom
    assert {(one.direction, one.pages) for one in seen} == {
        (direction, pages) for direction in DIRECTIONS for pages in path_trial.PAGES
    }
