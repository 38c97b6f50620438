"""The Mover on the fake device: every byte under random transfers and steps, and no wait or record to be left out."""

from __future__ import annotations

from pathlib import Path

import pytest
from mover_world import BATCHES, IGNORED, KERNELS, LAYERS, WHOLE, WHOLE_BATCHES, DeafRuntime, World

from strata.device.cpu_kernels import CpuKernels
from strata.device.cuda import CudaMover
from strata.device.cuda_runtime import Event, Stream
from strata.device.fake_cuda import FakeCudaRuntime
from strata.device.page_tables import PageTable, PageTables
from strata.device.path_choice import PathChoice

SEEDS = 40
ACTIONS = 80


@pytest.mark.parametrize(
    "choice",
    [KERNELS, BATCHES, WHOLE, WHOLE_BATCHES],
    ids=["kernels", "batches", "kernels-at-once", "batches-at-once"],
)
def test_every_byte_is_right(choice: PathChoice) -> None:
    moved = cancelled = 0
    for seed in range(SEEDS):
        world = World(seed, DeafRuntime(seed, None), choice)
        assert world.run(ACTIONS) == [], f"seed {seed}"
        assert world.mover.problem is None and not world.device_busy and not world.host_busy
        ends = [transfer.end for transfer in world.queue.transfers.values()]
        assert None not in ends
        loads = [one for one in world.queue.transfers.values() if one.kind == "load"]
        assert all(one.ready == LAYERS for one in loads if one.end is not None and one.end[1] is None)
        moved += sum(end is not None and end[1] is None for end in ends)
        cancelled += sum(end is not None and end[1] == "cancelled" for end in ends)
        world.mover.close()
        assert world.queue.closed[-1] and not world.runtime.registered
    assert moved > 5 * SEEDS and cancelled > SEEDS / 4


@pytest.mark.parametrize("ignored", IGNORED)
@pytest.mark.parametrize("choice", [KERNELS, WHOLE], ids=["by-layer", "at-once"])
def test_no_wait_and_no_record_can_be_left_out(ignored: str, choice: PathChoice) -> None:
    assert any(World(seed, DeafRuntime(seed, ignored), choice).run(ACTIONS) for seed in range(SEEDS)), (
        f"nobody notices where {ignored!r} does not happen"
    )


def test_the_end_of_a_transfer_that_is_given_up_cannot_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def never_recorded(self: CudaMover, stream: Stream) -> Event:
        return self._runtime.create_event()

    monkeypatch.setattr(CudaMover, "_end_of_part", never_recorded)
    assert any(World(seed, DeafRuntime(seed, None)).run(ACTIONS) for seed in range(SEEDS))


def test_a_page_table_in_use_cannot_be_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def take_any(self: PageTables, ids: int) -> PageTable:
        return self._free[0]

    monkeypatch.setattr(PageTables, "take", take_any)
    assert any(World(seed, DeafRuntime(seed, None)).run(ACTIONS) for seed in range(SEEDS))


def test_the_kernels_of_the_gpu_move_the_same_bytes(tmp_path: Path) -> None:
    kernels = CpuKernels.build(tmp_path)
    for seed in range(5):
        for choice in (KERNELS, WHOLE):
            world = World(seed, FakeCudaRuntime(seed, cpu_kernels=kernels), choice)
            assert world.run(ACTIONS) == [], f"seed {seed}"


def test_a_wait_for_what_has_come_holds_nobody() -> None:
    """The fake alone: where nothing else is left to run, too."""
    fake = FakeCudaRuntime(1)
    stream, event = fake.create_stream(), fake.create_event()
    fake.record(event, stream)
    fake.drain()
    fake.stream_wait_event(fake.compute_stream(), event)
    assert fake.is_empty
