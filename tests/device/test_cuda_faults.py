"""The Mover on a device that fails: what is outstanding fails, nothing is reported before the device has let go of it,
and what it had is given back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from mover_world import DEVICE_PAGES, HOST_PAGES, LAYERS, Transfer, World

from strata.device import cuda, host_registration
from strata.device.cuda_runtime import DeviceError
from strata.device.fake_cuda import FakeCudaRuntime
from strata.errors import CapacityError

SOON_S = 20.0


def world_of(seed: int = 1, **faults: object) -> World:
    """A world in which host pages 0 to 5 hold something."""
    world = World(seed, FakeCudaRuntime(seed, **faults))
    for _ in range(6):
        world.fill_host()
    return world


def load(world: World, count: int = 3, cancelled_after: int | None = None) -> int:
    """A load of so many host pages into the first free places of the device."""
    held = [page for page, content in enumerate(world.host) if content and page not in world.host_busy]
    busy = world.device_busy
    free = [page for page, content in enumerate(world.device) if not content and page not in busy]
    transfer = Transfer("load", held[:count], free[:count], cancelled_after=cancelled_after)
    number = world.queue.submit(transfer)
    for source, target in zip(transfer.source, transfer.target, strict=True):
        world.host_busy[source] = world.device_busy[target] = number
    return number


def until(true: Callable[[], bool]) -> None:
    """Waits for a thread."""
    deadline = time.monotonic() + SOON_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_failed_launch_fails_its_transfer_once_the_device_has_let_go() -> None:
    world = world_of()
    world.runtime.fail_next("launch", 3)  # the last layer of the load
    number = load(world)
    world.mover.look()
    transfer = world.queue.transfers[number]
    assert transfer.doomed and transfer.end is None, "two layers are still on their way"
    assert not world.mover.wait_layer(number, LAYERS - 1, world.compute, 0.0)
    world.runtime.drain()
    world.mover.look()
    assert transfer.end is not None and "launch" in str(transfer.end[1])
    assert world.runtime.sticky_errors == 0 and world.mover.problem is None
    assert world.run(30) == [], "what is left of a failed load harms nobody"


def test_launches_that_keep_failing_take_the_mover_out_of_service() -> None:
    world = world_of()
    numbers = []
    for _ in range(cuda.MOST_FAILURES):
        world.runtime.fail_next("launch")
        numbers.append(load(world, 1))
        world.mover.look()
    assert world.mover.problem is not None and "launch" in world.mover.problem
    world.runtime.drain()
    world.mover.look()
    ends = [world.queue.transfers[number].end for number in numbers]
    assert all(end is not None and end[1] for end in ends) and world.queue.closed == [False]
    world.mover.close()
    assert world.queue.closed[-1] and not world.runtime.registered


def test_a_lost_device_fails_everything_at_once() -> None:
    world = world_of()
    numbers = [load(world, 2), load(world, 2)]
    for _ in numbers:
        world.mover.look()
    world.runtime.fail_next("query")
    world.mover.look()
    assert all(world.queue.transfers[number].doomed for number in numbers)
    assert [world.queue.transfers[number].end for number in numbers] == [(0, "torn down")] * 2
    assert world.mover.problem is not None and world.queue.closed == [True]
    with pytest.raises(DeviceError, match="lost"):
        world.mover.step_done(world.compute)
    world.mover.close()


def test_a_step_whose_end_is_not_recorded_stops_all_transfers() -> None:
    world = world_of()
    world.runtime.fail_next("record")
    with pytest.raises(DeviceError):
        world.mover.step_done(world.compute)
    load(world)
    world.mover.look()
    assert world.queue.closed and world.mover.problem is not None
    assert len(world.queue.waiting) == 1 or world.queue.ended, (
        "a load that would not wait for the step was begun"
    )
    assert world.runtime.is_empty


def test_what_is_on_the_device_ends_well_when_the_mover_goes_out_of_service() -> None:
    world = world_of()
    up = load(world, 3)
    down = world.queue.submit(Transfer("backup", [DEVICE_PAGES - 1], [HOST_PAGES - 1]))
    for _ in range(2):
        world.mover.look()
    under_way = [world.queue.transfers[number] for number in (up, down)]
    world.mover._take_out_of_service("no more", fatal=False)
    assert all(transfer.end is None for transfer in under_way), "the device had not let go yet"
    world.runtime.drain()
    world.mover.look()
    assert [transfer.end for transfer in under_way] == [(3, None), (1, None)]


def test_a_cancelled_load_ends_after_what_was_queued_of_it() -> None:
    world = world_of()
    number = load(world, 3, cancelled_after=2)
    world.mover.look()
    transfer = world.queue.transfers[number]
    assert not world.runtime.is_empty and transfer.end is None
    world.runtime.drain()
    world.mover.look()
    assert transfer.end == (0, "cancelled")
    unbegun = load(world, 3, cancelled_after=0)
    world.mover.look()
    assert world.queue.transfers[unbegun].end == (0, "cancelled") and world.runtime.is_empty


def held_backups(monkeypatch: pytest.MonkeyPatch, count: int = 6) -> tuple[World, list[int]]:
    """A world whose device stands still under more backups than it has page tables, and their numbers."""
    monkeypatch.setattr(cuda, "MOST_IN_FLIGHT", 4)
    monkeypatch.setattr(cuda, "MOST_BACKUPS", 2)
    world = world_of()
    monkeypatch.setattr(world.runtime, "_let_run", lambda most: None)
    numbers = [
        world.queue.submit(Transfer("backup", [page], [HOST_PAGES - 1 - page])) for page in range(count)
    ]
    for _ in range(2 * count):
        world.mover.look()
    return world, numbers


def test_a_load_does_not_wait_for_backups(monkeypatch: pytest.MonkeyPatch) -> None:
    world, backups = held_backups(monkeypatch)
    assert len(world.mover._flights) == 2, "backups take the place of loads"
    number = world.queue.submit(Transfer("load", [0], [9]))
    world.mover.look()
    assert number in world.mover._flights
    for _ in range(20):
        world.runtime.drain()
        world.mover.look()
    ended = [world.queue.transfers[one].end for one in [*backups, number]]
    assert ended == [(1, None)] * len(ended)
    assert [one for one in world.queue.ended if one in backups] == backups, "backups change their order"
    assert world.mover.close()


def test_backups_that_wait_end_with_the_mover(monkeypatch: pytest.MonkeyPatch) -> None:
    world, backups = held_backups(monkeypatch)
    world.runtime.drain()
    assert world.mover.close()
    ends = [world.queue.transfers[one].end for one in backups]
    assert ends == [(1, None)] * 2 + [(0, "cancelled")] * 4


@pytest.mark.parametrize("fatal", [False, True])
def test_backups_that_wait_end_with_the_service(monkeypatch: pytest.MonkeyPatch, fatal: bool) -> None:
    world, backups = held_backups(monkeypatch)
    world.mover._take_out_of_service("no more", fatal)
    assert [world.queue.transfers[one].end for one in backups[2:]] == [(0, "no more")] * 4
    for _ in range(5):
        world.runtime.drain()
        world.mover.look()
    assert sorted(world.queue.ended) == backups
    world.mover.close()


def test_pages_that_do_not_exist_fail_the_transfer_alone() -> None:
    world = world_of()
    number = world.queue.submit(Transfer("load", [HOST_PAGES], [0]))
    world.mover.look()
    end = world.queue.transfers[number].end
    assert end is not None and f"host page {HOST_PAGES} does not exist" in str(end[1])
    assert world.mover.problem is None


def test_confirm_asks_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    world = world_of()
    number = load(world)
    world.mover.look()
    monkeypatch.setattr(world.runtime, "_let_run", lambda most: None)
    assert not world.mover.confirm(number, 0.002)
    world.runtime.drain()
    assert world.mover.confirm(number, 0.0) and world.queue.transfers[number].end is None
    world.mover.look()
    assert world.mover.confirm(number, 0.0), "its end was reported"


def test_close_waits_for_the_device_and_gives_everything_back() -> None:
    world = world_of()
    number = load(world)
    world.mover.look()
    assert world.mover.close()
    end = world.queue.transfers[number].end
    assert end == (3, None) and not world.runtime.registered and world.queue.closed[-1]
    world.mover.close()


def test_what_the_device_still_holds_at_the_end_stays_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    world = world_of()
    number = load(world)
    world.mover.look()
    monkeypatch.setattr(world.runtime, "_let_run", lambda most: None)
    assert not world.mover.close(limit_s=0.01)
    assert world.queue.transfers[number].end is None and True not in world.queue.closed
    assert world.runtime.registered and world.mover.problem is not None
    world.runtime.drain()
    assert world.mover.close()
    assert world.queue.transfers[number].end == (3, None) and not world.runtime.registered


def test_a_refused_registration_says_what_to_do_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stride = 192
    monkeypatch.setattr(host_registration, "CHUNK_BYTES", 4 * stride + 100)
    runtime = FakeCudaRuntime(fail={"register_host": 3})
    with pytest.raises(CapacityError) as refused:
        World(1, runtime)
    text = str(refused.value)
    assert f"{2 * 4 * stride:,} of the {HOST_PAGES * stride:,} bytes" in text
    assert "--host-memory" in text and "ulimit -l" in text
    assert not runtime.registered and runtime.sticky_errors == 0
    runtime = FakeCudaRuntime()
    World(1, runtime)
    sizes = [size for _, size in sorted(runtime.registered.items())]
    assert sizes == [4 * stride] * 3 + [2 * stride], "a page lies in two chunks"


def test_a_device_without_room_says_how_much_it_has() -> None:
    runtime = FakeCudaRuntime(fail={"allocate_pool": 1})
    with pytest.raises(CapacityError, match="--device-memory"):
        World(1, runtime)
    assert runtime.sticky_errors == 0


def test_the_thread_wakes_whoever_waits_for_a_load_that_has_not_begun() -> None:
    world = world_of()
    world.mover._thread = threading.Thread(target=world.mover._run, daemon=True)
    found: list[bool] = []
    number = len(world.queue.transfers) + 1
    waiter = threading.Thread(
        target=lambda: found.append(world.mover.wait_layer(number, LAYERS - 1, world.compute, SOON_S))
    )
    waiter.start()
    load(world)
    world.mover._thread.start()
    waiter.join(SOON_S)
    assert found == [True]
    until(lambda: world.queue.transfers[number].end is not None)
    world.mover.close()
    assert not world.runtime.registered
