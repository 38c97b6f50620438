"""The device tier of an NVIDIA GPU: its pool, and the Mover that carries pages between it and the host arena.

What the Mover guarantees, beside what every Mover does:
- A load waits on its stream for every step, on whatever stream, that was reported before it was taken, and so does a
  backup. Core moves a page only once its last reader and its writer were reported, so that covers both, and never holds
  a load behind the step that runs.
- A layer has an event of its own, and whoever computes it waits for that event on its stream: no host waits for it.
- A transfer ends once an event behind all of it was seen complete, or the device is lost; nothing else frees its pages.
- A device that fails takes the Mover out of service, and so does any error of the Mover's own: everything outstanding
  fails, each transfer once, and `problem` says why.
- What the device may still use when it falls silent is never freed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from strata.device.cuda_runtime import CudaRuntime, DeviceError, Event, Stream
from strata.device.edge import Edge, PagePairs, Work
from strata.device.host_registration import HostRegistration
from strata.device.page_tables import PageTable, PageTables
from strata.device.path_choice import DIRECTIONS, Direction, PathChoice
from strata.device.path_trial import measure_paths
from strata.device.step_fence import StepFence
from strata.device.transfer_source import TransferSource
from strata.errors import CapacityError

_log = logging.getLogger("strata.device")

MOST_IN_FLIGHT = 16
"""Transfers on the device at once: enough that it never waits for the host, few enough that a late load is not behind
many."""
POLL_S = 100e-6
"""How often completions are looked for while something is in flight."""
IDLE_S = 0.05
"""How long the thread sleeps with nothing in flight; a transfer wakes it."""
MOST_BACKUPS = 4
"""Backups among them: further ones wait here, so that however many there are, a load finds room at once."""
MOST_FAILURES = 3
"""Transfers in a row that may fail to be queued before the Mover goes out of service."""
CLOSE_S = 5.0
"""How long `close` waits for what is in flight."""

_Taken = tuple[int, str, npt.NDArray[np.uint32], npt.NDArray[np.uint32]]
"""A transfer as `TransferSource.take` gives it."""

_NEVER_FREED: list[CudaMover] = []
"""Movers, with all that they keep, of devices that may still be writing when nobody can tell any more."""


@dataclass(frozen=True)
class CudaPool:
    """The device tier's memory: a tensor on the GPU."""

    tensor: torch.Tensor
    address: int
    size_bytes: int

    @classmethod
    def allocate(cls, shape: tuple[int, ...], dtype: torch.dtype, runtime: CudaRuntime) -> CudaPool:
        """A pool of zeros. Raises CapacityError with what the device has left."""
        size_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        try:
            tensor = runtime.allocate_pool(shape, dtype)
        except DeviceError as error:
            runtime.clear_sticky_error()
            left = runtime.memory_info()
            raise CapacityError(
                f"the device refuses {size_bytes:,} bytes for --device-memory ({error}): {left.free:,} of its "
                f"{left.total:,} bytes are free; give a smaller --device-memory"
            ) from error
        return cls(tensor, tensor.data_ptr(), size_bytes)


@dataclass
class _Flight:
    """A transfer on the device. `events` has one for each command that was queued; `end` is behind all of it. A load
    has a command for each layer, or one for all."""

    transfer: int
    direction: Direction
    pages: int
    commands: int
    table: PageTable
    began: float
    events: list[Event] = field(default_factory=list)
    end: Event | None = None
    ready: int = 0
    failure: str | None = None
    cancelled: bool = False

    @property
    def is_queued(self) -> bool:
        """Whether every command is on the stream."""
        return len(self.events) == self.commands

    def event_of(self, layer: int) -> Event | None:
        """What the layer is behind, once its command is queued."""
        place = min(layer, self.commands - 1)
        return self.events[place] if place < len(self.events) else None


@dataclass
class _Lane:
    """One direction: its stream, and what is on it in order."""

    stream: Stream
    flights: deque[_Flight] = field(default_factory=deque)
    last_end: float = 0.0


class CudaMover:
    """Executes the transfers of one engine on a thread of its own. `start` before the engine's Core, `close` after it.

    `choice` says how transfers go; without one that is measured at the start. `keeps` are the owners of both pools'
    memory: they live on with a Mover whose device falls silent.
    """

    def __init__(
        self,
        runtime: CudaRuntime,
        queue: TransferSource,
        edge: Edge,
        choice: PathChoice | None = None,
        keeps: tuple[object, ...] = (),
    ) -> None:
        self._runtime = runtime
        self._queue = queue
        self._edge = edge
        self._choice = choice
        self._keeps = keeps
        self._registration = HostRegistration(
            runtime, edge.host_address, edge.host_bytes, edge.host_layout.page_stride
        )
        self._tables = PageTables(runtime, MOST_IN_FLIGHT, edge.device_pages)
        self._lanes: dict[Direction, _Lane] = {}
        self._spare_events: list[Event] = []
        self._steps = StepFence(runtime)
        self._changed = threading.Condition()
        self._flights: dict[int, _Flight] = {}
        self._held: deque[_Taken] = deque()
        self._problem: str | None = None
        self._failures = 0
        self._lost = False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    # --- before and after --------------------------------------------------------------------------------------

    def start(self) -> None:
        """Prepares, and starts the thread that looks from then on."""
        self.prepare()
        self._thread = threading.Thread(target=self._run, name="strata-mover", daemon=True)
        self._thread.start()

    def prepare(self) -> None:
        """Pins the arena, makes the streams and page tables, measures the paths. Raises CapacityError or DeviceError;
        then nothing is left behind, unless the error is fatal: then nothing is freed, for good."""
        self._runtime.bind_thread()
        self._registration.pin()
        try:
            self._steps.prepare()
            for direction in DIRECTIONS:
                # What the model waits for does not queue up behind the blocks of its own kernels.
                self._lanes[direction] = _Lane(self._runtime.create_stream(urgent=direction == "load"))
            self._tables.prepare()
            if self._choice is None:
                self._choice = measure_paths(
                    self._runtime, self._edge, self._tables, self._lanes["load"].stream
                )
            _log.info("%s: %s", self._runtime.describe(), self._choice)
        except BaseException as error:
            if isinstance(error, DeviceError) and error.fatal:
                # A trial may be writing still.
                _NEVER_FREED.append(self)
            else:
                self._give_back()
            raise

    def close(self, limit_s: float = CLOSE_S) -> bool:
        """Takes nothing more, waits until the device has let go of what is in flight, and gives all back. False if it
        still holds something after `limit_s` seconds: both pools must then outlive the process's use of the device. May
        be called again."""
        deadline = time.monotonic() + limit_s
        self._queue.close()
        self._stop.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(limit_s + 2 * IDLE_S)
        if thread is not None and thread.is_alive():
            self._problem = f"the Mover's thread did not end within {limit_s:g} s"
            _log.error("%s: all of its memory stays reserved", self._problem)
            return False
        for transfer, *_ in self._no_longer_held():
            self._queue.cancelled(transfer, 0.0)
        try:
            self._runtime.bind_thread()
        except Exception as error:  # noqa: BLE001 - what can be given back still is
            self._take_out_of_service(*_told(error))
        while self._flights and not self._lost and time.monotonic() < deadline:
            self._poll()
            time.sleep(POLL_S)
        if self._flights and not self._lost:
            self._problem = (
                f"{len(self._flights)} transfers were still on the device {limit_s:g} s after the end"
            )
            _log.error("%s: their memory stays reserved", self._problem)
            return False
        self._give_back()
        self._queue.close(torn_down=True)
        return True

    def _give_back(self) -> None:
        """Streams, events, buffers and the arena, none of which is in use. A lost device takes nothing back."""
        try:
            self._steps.close()
            for lane in self._lanes.values():
                self._runtime.destroy_stream(lane.stream)
            for event in self._spare_events:
                self._runtime.destroy_event(event)
            self._tables.close()
        except DeviceError as error:
            self._runtime.clear_sticky_error()
            _log.warning("the device does not take back what its Mover had: %s", error)
        self._lanes, self._spare_events = {}, []
        self._registration.unpin()

    # --- the engine's side -------------------------------------------------------------------------------------

    @property
    def problem(self) -> str | None:
        """Why the Mover is out of service; None while it serves."""
        return self._problem

    @property
    def lost(self) -> bool:
        """Whether the device's context is lost: nothing helps but to start the process anew."""
        return self._lost

    def step_done(self, stream: Stream) -> None:
        """A step's last kernel is on `stream`. Must come before Core hears of the step, whatever became of it. Raises
        DeviceError: then no transfer is begun any more. After `close` there is none to wait for the step."""
        try:
            self._steps.step_done(stream)
        except DeviceError as error:
            # Without this event a later transfer would not wait for the step.
            self._take_out_of_service(f"the end of a step cannot be recorded: {error}", error.fatal)
            raise

    def step_begins(self, stream: Stream) -> None:
        """What is put on `stream` from now on comes after every step that was reported: needed where pages that one
        stream used go to another. Raises DeviceError."""
        self._steps.hold(stream)

    def wait_layer(self, transfer: int, layer: int, stream: Stream, timeout_s: float) -> bool:
        """Makes `stream` wait for a layer of a load, once the load is queued that far. False if that has not come about
        within `timeout_s` seconds: the load has not begun, has ended, or has failed; its ticket says which."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                flight = self._flights.get(transfer)
                if flight is not None and (event := flight.event_of(layer)) is not None:
                    self._runtime.stream_wait_event(stream, event)
                    return True
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(left)

    def confirm(self, transfer: int, timeout_s: float) -> bool:
        """Whether the device says that a load is whole, or its end was reported already; waits at most `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while (flight := self._flights.get(transfer)) is not None:
                if flight.is_queued and self._runtime.query(flight.events[-1]):
                    return True
                if flight.failure or self._problem is not None or time.monotonic() >= deadline:
                    return False
                self._changed.wait(POLL_S)
        return True

    # --- the Mover's thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._runtime.bind_thread()
            while not self._stop.is_set() and not self._lost:
                self.look()
        except Exception as error:  # noqa: BLE001 - the last line of defence: `/health` says so
            _log.exception("the Mover's thread has ended")
            self._take_out_of_service(f"its thread has ended: {error}", fatal=False)

    def look(self) -> None:
        """One turn of the Mover's thread, or of a caller in its place: reports what has ended, begins what waits."""
        try:
            self._poll()
            if self._problem is not None:
                time.sleep(POLL_S if self._flights else IDLE_S)
            elif not self._tables.has_room:
                time.sleep(POLL_S)
            elif (taken := self._next()) is not None:
                self._begin(*taken)
        except Exception as error:  # noqa: BLE001 - the thread goes on looking for the ends of what is in flight
            self._runtime.clear_sticky_error()
            self._take_out_of_service(*_told(error))
            time.sleep(POLL_S)

    def _next(self) -> _Taken | None:
        """What to begin now, if anything: a backup only while few are on the device."""
        with self._changed:
            backups = len(self._lanes["backup"].flights)
            if self._held and backups < MOST_BACKUPS:
                return self._held.popleft()
        taken = self._queue.take(POLL_S if self._flights else IDLE_S)
        if taken is None or taken[1] == "load" or backups < MOST_BACKUPS:
            return taken
        with self._changed:
            if self._problem is not None:
                return taken  # `_begin` ends it
            self._held.append(taken)
        return None

    def _no_longer_held(self) -> list[_Taken]:
        """What was taken and not begun, for whoever ends it."""
        with self._changed:
            held, self._held = list(self._held), deque()
        return held

    def _begin(
        self, transfer: int, kind: str, source: npt.NDArray[np.uint32], destination: npt.NDArray[np.uint32]
    ) -> None:
        direction: Direction = "load" if kind == "load" else "backup"
        pairs = PagePairs(destination, source) if direction == "load" else PagePairs(source, destination)
        try:
            if self._queue.is_cancelled(transfer):
                self._queue.cancelled(transfer, 0.0)
                return
            problem = pairs.problem(self._edge) or self._problem
            if problem is not None:
                self._queue.done(transfer, 0, 0, 0.0, problem)
                return
            flight, work = self._flight(transfer, direction, pairs)
        except Exception as error:  # noqa: BLE001 - it was taken, so that it must end
            self._runtime.clear_sticky_error()
            self._queue.done(transfer, 0, 0, 0.0, f"it cannot be begun: {_told(error)[0]}")
            self._count_failure(error)
            return
        lane = self._lanes[direction]
        with self._changed:
            if self._lost:
                return  # it has ended with all others
            lane.flights.append(flight)
            self._flights[transfer] = flight
        self._queue_work(flight, work, lane.stream)

    def _flight(self, transfer: int, direction: Direction, pairs: PagePairs) -> tuple[_Flight, Work]:
        """A transfer of which nothing is queued yet."""
        assert self._choice is not None, "start() chooses"
        pages = len(pairs.device)
        work = Work(self._runtime, self._edge, direction, pairs, self._choice.of(direction, pages))
        began = self._runtime.now()
        return _Flight(transfer, direction, pages, work.commands, self._tables.take(pages), began), work

    def _queue_work(self, flight: _Flight, work: Work, stream: Stream) -> None:
        """Puts a transfer on the device, or as much of it as goes. What was queued of one that an error cuts off
        here is there all the same: `_has_ended` sees to its end."""
        try:
            # The pages' last readers and their writer are behind this: see the top of the file.
            self._steps.hold(stream)
            work.begin(flight.table, stream)
            for command in range(work.commands):
                if self._queue.is_cancelled(flight.transfer):
                    flight.cancelled = True
                    break
                work.queue(command, stream)
                self._note_event(flight, self._record(stream))
            self._failures = 0
        except DeviceError as error:
            self._runtime.clear_sticky_error()
            flight.failure = str(error)
            self._queue.doom(flight.transfer, flight.failure)
            self._count_failure(error)
        # What was queued runs all the same: the pages are free when the device has come past it.
        flight.end = flight.events[-1] if flight.is_queued else self._end_of_part(stream)
        with self._changed:
            self._changed.notify_all()

    def _record(self, stream: Stream) -> Event:
        event = self._spare_events.pop() if self._spare_events else self._runtime.create_event()
        try:
            self._runtime.record(event, stream)
        except BaseException:
            self._spare_events.append(event)
            raise
        return event

    def _end_of_part(self, stream: Stream) -> Event:
        """Behind what was queued of a transfer that is given up."""
        return self._record(stream)

    def _note_event(self, flight: _Flight, event: Event) -> None:
        with self._changed:
            flight.events.append(event)
            self._changed.notify_all()

    def _poll(self) -> None:
        """Reports what the device has come past, in the order in which it does."""
        for lane in self._lanes.values():
            try:
                while (flight := self._first(lane)) is not None and self._has_ended(flight, lane.stream):
                    self._end(flight, lane)
            except Exception as error:  # noqa: BLE001 - what is on the other lane ends all the same
                self._runtime.clear_sticky_error()
                self._take_out_of_service(*_told(error))

    def _first(self, lane: _Lane) -> _Flight | None:
        with self._changed:
            return lane.flights[0] if lane.flights else None

    def _has_ended(self, flight: _Flight, stream: Stream) -> bool:
        ready = flight.ready
        while ready < len(flight.events) and self._runtime.query(flight.events[ready]):
            ready += 1
        if ready > flight.ready:
            if flight.direction == "load":
                whole = ready == flight.commands
                self._queue.layers_ready(flight.transfer, self._edge.layers if whole else ready)
            flight.ready = ready
        if flight.is_queued:
            return ready == flight.commands
        if flight.end is None:
            # It could not be recorded before, and without it nothing tells when the device lets go.
            flight.end = self._end_of_part(stream)
        return self._runtime.query(flight.end)

    def _end(self, flight: _Flight, lane: _Lane) -> None:
        now = self._runtime.now()
        busy = max(0.0, now - max(flight.began, lane.last_end))
        lane.last_end = now
        with self._changed:
            if self._lost:
                return  # it has ended with all others
            # The ticket first: whoever does not find the load here reads it there.
            if flight.ready == flight.commands:
                # All of it is there, whatever has gone wrong beside it since.
                moved = flight.pages * self._edge.page_bytes
                self._queue.done(flight.transfer, flight.pages, moved, busy)
            elif flight.cancelled:
                self._queue.cancelled(flight.transfer, busy)
            else:
                failure = flight.failure or "the device did not carry all of it out"
                self._queue.done(flight.transfer, 0, 0, busy, failure)
            lane.flights.popleft()
            del self._flights[flight.transfer]
            self._changed.notify_all()
        self._tables.release(flight.table)
        self._spare_events += flight.events
        if flight.end is not None and not flight.is_queued:
            self._spare_events.append(flight.end)

    def _count_failure(self, error: Exception) -> None:
        """A device refuses now and then; any other error would come again."""
        self._failures += 1
        reason, fatal = _told(error)
        if fatal or not isinstance(error, DeviceError) or self._failures >= MOST_FAILURES:
            self._take_out_of_service(reason, fatal)

    def _take_out_of_service(self, reason: str, fatal: bool) -> None:
        """Everything outstanding fails. Its pages are free once the device has come past it, or is lost. For any
        thread."""
        with self._changed:
            if self._problem is None:
                _log.error("the Mover is out of service: %s", reason)
            self._problem = self._problem or reason
            for flight in self._flights.values():
                flight.failure = flight.failure or reason
                self._queue.doom(flight.transfer, reason)
            if fatal:
                self._lost = True
                self._flights.clear()
                for lane in self._lanes.values():
                    lane.flights.clear()
            self._changed.notify_all()
        for transfer, *_ in self._no_longer_held():
            self._queue.done(transfer, 0, 0, 0.0, reason)
        # Nothing runs in a context that is lost.
        self._queue.close(torn_down=fatal)


def _told(error: Exception) -> tuple[str, bool]:
    """What an error says, and whether the device is lost with it."""
    if isinstance(error, DeviceError):
        return str(error), error.fatal
    return f"{type(error).__name__}: {error}", False
