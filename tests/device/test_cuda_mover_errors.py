"""The Mover under errors that are not the device's, at the start and at the end: every transfer that was taken ends
exactly once, the thread goes on, and nothing that a device may still use is given back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from mover_world import LAYERS, DeafRuntime, Transfer, World
from test_cuda_faults import SOON_S, load, until, world_of

from strata.device import cuda
from strata.device.cuda_runtime import DeviceError, Event, Stream
from strata.device.fake_cuda import FakeCudaRuntime
from strata.errors import CapacityError, ConfigError

ERRORS = (ConfigError("words of 4 bytes"), MemoryError("no room"), KeyError("a bug"))


def break_at(owner: object, method: str, call: int, error: Exception) -> None:
    """Makes one call of a method, counted from 1, raise an error that no runtime should raise."""
    whole: Callable[..., Any] = getattr(owner, method)
    calls = [0]

    def broken(*arguments: object, **named: object) -> Any:
        calls[0] += 1
        if calls[0] == call:
            raise error
        return whole(*arguments, **named)

    setattr(owner, method, broken)


PLACES = {
    "is it cancelled": (lambda world: world.queue, "is_cancelled", 1),
    "its page table": (lambda world: world.mover._tables, "take", 1),
    "its clock": (lambda world: world.runtime, "now", 1),
    "its wait": (lambda world: world.runtime, "stream_wait_event", 1),
    "its table's way": (lambda world: world.runtime, "copy_async", 1),
    "its first layer": (lambda world: world.runtime, "launch", 1),
    "its last layer": (lambda world: world.runtime, "launch", LAYERS),
    "its last event": (lambda world: world.runtime, "record", LAYERS),
}


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("place", PLACES)
def test_whatever_goes_wrong_every_transfer_ends_once(place: str, error: Exception) -> None:
    world = world_of()
    earlier = load(world, 2)
    world.mover.look()
    broken = load(world, 2)
    owner, method, call = PLACES[place]
    break_at(owner(world), method, call, error)
    world.mover.look()
    problem = world.mover.problem
    assert problem is not None and type(error).__name__ in problem and not world.mover.lost
    for _ in range(10):
        world.runtime.drain()
        world.mover.look()
    ends = [world.queue.transfers[number].end for number in (earlier, broken)]
    assert None not in ends and sorted(world.queue.ended) == [earlier, broken]
    assert ends[1] is not None and type(error).__name__ in str(ends[1][1])
    assert world.mover.close() and not world.runtime.registered and not world.runtime._owned


@pytest.mark.parametrize("method", ["query", "now"])
def test_an_error_while_looking_for_ends_stops_no_end(method: str) -> None:
    world = world_of()
    load_number = load(world, 2)
    world.mover.look()
    backup = world.queue.submit(Transfer("backup", [9], [13]))
    world.mover.look()
    world.runtime.drain()
    assert world.queue.ended == []
    break_at(world.runtime, method, 1, MemoryError("no room"))
    world.mover.look()
    assert backup in world.queue.ended, "the other direction waits for nothing"
    world.mover.look()
    assert sorted(world.queue.ended) == [load_number, backup]
    assert world.mover.problem is not None and "MemoryError" in world.mover.problem


def test_an_end_that_could_not_be_recorded_is_recorded_later() -> None:
    world = world_of()
    number = load(world, 2)
    world.runtime.fail_next("launch", LAYERS)
    break_at(world.runtime, "record", LAYERS, MemoryError("no room"))  # behind what was queued
    world.mover.look()
    assert world.queue.transfers[number].doomed and world.queue.ended == []
    for _ in range(3):
        world.runtime.drain()
        world.mover.look()
    assert world.queue.ended == [number]


def test_the_thread_survives_errors() -> None:
    world = world_of()
    break_at(world.runtime, "launch", LAYERS, ConfigError("words of 4 bytes"))
    number = load(world)
    world.mover._thread = threading.Thread(target=world.mover._run, daemon=True)
    world.mover._thread.start()
    until(lambda: world.queue.transfers[number].end is not None)
    assert world.mover._thread.is_alive() and "words of 4 bytes" in str(world.mover.problem)
    assert world.mover.close()


@pytest.mark.parametrize("fatal", [False, True])
def test_a_step_that_is_not_recorded_takes_the_mover_out_of_service_at_once(fatal: bool) -> None:
    world = world_of(lose_on=("record",) if fatal else ())
    number = load(world)
    world.mover.look()
    assert not world.mover.lost
    world.runtime.fail_next("record")
    with pytest.raises(DeviceError, match="record fails on cue"):
        world.mover.step_done(world.compute)
    transfer = world.queue.transfers[number]
    assert transfer.doomed and "the end of a step" in str(world.mover.problem)
    assert world.mover.lost is fatal and world.queue.closed == [fatal]
    assert transfer.end == ((0, "torn down") if fatal else None)
    for _ in range(5):
        world.runtime.drain()
        world.mover.look()
    assert world.queue.ended == [number]
    world.mover.close()


class SlowRecord(DeafRuntime):
    """A fake whose records of the step's event take as long as a test wants."""

    def __init__(self) -> None:
        super().__init__(1, None)
        self.began, self.may_end = threading.Event(), threading.Event()
        self.recording = self.destroyed_meanwhile = False

    def record(self, event: Event, stream: Stream) -> None:
        if event == self._step_event:
            self.recording = True
            self.began.set()
            assert self.may_end.wait(SOON_S)
            super().record(event, stream)
            self.recording = False
        else:
            super().record(event, stream)

    def destroy_event(self, event: Event) -> None:
        self.destroyed_meanwhile |= event == self._step_event and self.recording
        super().destroy_event(event)


def test_the_steps_event_outlives_its_record() -> None:
    runtime = SlowRecord()
    world = World(1, runtime)
    errors: list[BaseException] = []

    def step() -> None:
        try:
            world.mover.step_done(world.compute)
        except BaseException as error:  # noqa: BLE001 - told by the test's thread
            errors.append(error)

    stepping = threading.Thread(target=step)
    closing = threading.Thread(target=world.mover.close)
    stepping.start()
    assert runtime.began.wait(SOON_S)
    closing.start()
    closing.join(0.2)  # time enough for what must not happen
    runtime.may_end.set()
    stepping.join(SOON_S)
    closing.join(SOON_S)
    assert not stepping.is_alive() and not closing.is_alive()
    assert errors == [] and not runtime.destroyed_meanwhile and not runtime.registered
    world.mover.step_done(world.compute)  # nobody is left to wait for it


def test_what_a_silent_device_may_use_is_never_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strata.device.path_trial.SILENCE_S", 0.01)
    monkeypatch.setattr(cuda, "_NEVER_FREED", [])
    runtime = FakeCudaRuntime(1)
    monkeypatch.setattr(runtime, "_let_run", lambda most: None)
    with pytest.raises(DeviceError, match="did not end"):
        World(1, runtime, choice=None)
    assert "unregister_host" not in runtime.calls and "destroy_stream" not in runtime.calls
    assert len(runtime._owned) == 2 * cuda.MOST_IN_FLIGHT, "a page table was given back"
    [mover] = cuda._NEVER_FREED
    pool, arena = mover._keeps
    assert pool.tensor.data_ptr() == mover._edge.device_address
    assert 0 <= mover._edge.host_address - arena.ctypes.data < arena.nbytes
    runtime.drain()
    assert runtime.lost is None, "the device found all of it"


def test_page_tables_are_made_before_the_first_transfer() -> None:
    world = world_of()
    for method in ("allocate_device", "allocate_pinned"):
        assert world.runtime.calls[method] == cuda.MOST_IN_FLIGHT
    assert world.run(80) == []
    for method in ("allocate_device", "allocate_pinned"):
        assert world.runtime.calls[method] == cuda.MOST_IN_FLIGHT
    assert world.mover.close() and not world.runtime._owned


@pytest.mark.parametrize("half", ["allocate_device", "allocate_pinned"])
def test_page_tables_without_room_leave_nothing(half: str) -> None:
    runtime = FakeCudaRuntime(fail={half: 3})
    with pytest.raises(CapacityError, match=r"16 page tables of 80 bytes.*--device-memory"):
        World(1, runtime)
    assert not runtime._owned and not runtime.registered and runtime.sticky_errors == 0
