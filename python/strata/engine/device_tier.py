"""The device tier as the engine drives it: its pool, how a step waits for loads and says that it is over, and what
moves pages. On a CPU copy threads of Core do that, and most calls here mean nothing; on a GPU it is a Mover in this
process.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

from strata._core import HostArena, Plan, TransferQueue
from strata.device import CpuPool, DevicePool
from strata.device.cuda import POLL_S, CudaMover, CudaPool
from strata.device.cuda_runtime import CudaRuntime, DeviceError, Event
from strata.engine.cuda_carrier import QUEUED_TRANSFERS, edge_of, settle_loads
from strata.engine.runtime_options import PARTS
from strata.errors import LoadFailedError
from strata.models import CausalLM, pool_shape

_log = logging.getLogger("strata.engine")

_NEVER_FREED: list[CudaTier] = []


class DeviceTier(Protocol):
    """What the engine's thread asks of its device. `mover` and `arena` go to `Runtime` as they are."""

    @property
    def pool(self) -> DevicePool:
        """The memory that the model computes from."""
        ...

    @property
    def mover(self) -> TransferQueue | None:
        """Where Core puts transfers; None: its own threads copy."""
        ...

    @property
    def arena(self) -> HostArena | None:
        """The host tier's memory, where somebody else must know it."""
        ...

    @property
    def description(self) -> str:
        """The device in words."""
        ...

    @property
    def problem(self) -> str | None:
        """Why transfers fail; None while all is well."""
        ...

    @property
    def lost(self) -> bool:
        """Whether nothing on the device will ever answer again: only another process gets it back."""
        ...

    @property
    def runs_behind(self) -> bool:
        """Whether a step may still be computed when its call has returned."""
        ...

    def bind_thread(self) -> None:
        """The calling thread will compute."""
        ...

    def wait_layer(self, plan: Plan, layer: int, timeout_s: float) -> None:
        """What the model queues from now on finds this layer of the plan's loads. Raises LoadFailedError."""
        ...

    def step_done(self) -> None:
        """All of a step is queued, or it has failed. Comes before Core hears of it. Raises DeviceError."""
        ...

    def confirm_loads(self, plan: Plan, timeout_s: float) -> None:
        """Everything that the step read has come. Raises LoadFailedError if something has not, DeviceError."""
        ...

    def wait_step_before(self, timeout_s: float) -> bool:
        """The step before the latest one is over, so that the host is never further ahead; whether it was not over when
        this was called. Raises DeviceError, also if it runs for longer than `timeout_s` seconds."""
        ...

    def close(self) -> None:
        """After Core's end: stops moving and gives back what is held. Idempotent."""
        ...


class CpuTier:
    """Tensors in RAM and copy threads: what is waited for is there when the call returns."""

    mover: TransferQueue | None = None
    arena: HostArena | None = None
    description = "cpu"
    problem: str | None = None
    lost = False
    runs_behind = False

    def __init__(self, model: CausalLM, pages: int, page_size: int) -> None:
        self.pool: DevicePool = CpuPool.allocate(pool_shape(model.config, pages, page_size), model.dtype)

    def bind_thread(self) -> None:
        """Any thread computes."""

    def wait_layer(self, plan: Plan, layer: int, timeout_s: float) -> None:
        """Waits for the ticket."""
        outcome = plan.wait_layer(layer, timeout_s)
        if outcome != "ready":
            raise _not_loaded(plan, layer, outcome)

    def step_done(self) -> None:
        """A step is over when its call returns."""

    def confirm_loads(self, plan: Plan, timeout_s: float) -> None:
        """They were waited for."""

    def wait_step_before(self, timeout_s: float) -> bool:
        """It was over when its call returned."""
        return False

    def close(self) -> None:
        """Core's threads end with it."""


class CudaTier:
    """A GPU, or what stands in for one. `options` are those of `Runtime`. Raises CapacityError or DeviceError."""

    runs_behind = True

    def __init__(
        self, runtime: CudaRuntime, model: CausalLM, options: dict[str, Any], page_size: int
    ) -> None:
        runtime.bind_thread()
        self._runtime = runtime
        self._layers = model.config.layers
        self.description = f"cuda: {runtime.describe()}"
        pages = options["device_pages"]
        self.pool: DevicePool = CudaPool.allocate(
            pool_shape(model.config, pages, page_size), model.dtype, runtime
        )
        self.arena: HostArena | None = HostArena(options)
        self.mover: TransferQueue | None = TransferQueue(QUEUED_TRANSFERS)
        piece = options["token_bytes"] * page_size
        edge = edge_of(self.arena, self.pool.address, self._layers, PARTS, pages, piece)
        # Ends of steps, in turn: the latest one's and that of the one before it.
        self._ends: tuple[Event, ...] = (runtime.create_event(), runtime.create_event())
        self._steps = 0
        self._lost = False
        self._mover = CudaMover(runtime, self.mover, edge, keeps=(self.pool, self.arena))
        self._mover.start()

    @property
    def problem(self) -> str | None:
        """Why the Mover is out of service."""
        return self._mover.problem

    @property
    def lost(self) -> bool:
        """Whether the Mover or a step has found the device's context lost."""
        return self._lost or self._mover.lost

    def bind_thread(self) -> None:
        """Makes the device the thread's."""
        self._runtime.bind_thread()

    def wait_layer(self, plan: Plan, layer: int, timeout_s: float) -> None:
        """Makes the compute stream wait for the layer's events. The host waits for loads that are not queued yet."""
        stream = self._runtime.compute_stream()

        def is_ordered(load: int, limit_s: float) -> bool:
            return self._mover.wait_layer(load, layer, stream, limit_s)

        self._each_load(plan, layer, timeout_s, is_ordered)

    def step_done(self) -> None:
        """Records the step's end, for the transfers after it and for the step after the next."""
        stream = self._runtime.compute_stream()
        self._steps += 1
        try:
            self._mover.step_done(stream)
            self._runtime.record(self._ends[self._steps % 2], stream)
        except DeviceError as error:
            self._note(error)
            raise

    def confirm_loads(self, plan: Plan, timeout_s: float) -> None:
        """Asks the device for the loads' ends: without it a step that samples nothing would build on loads that may
        still fail."""
        self._each_load(plan, self._layers - 1, timeout_s, self._mover.confirm)

    def wait_step_before(self, timeout_s: float) -> bool:
        """Polls, and sleeps in between. A load that comes now is then behind the running step and the queued one at
        most, however many chunks a prompt has."""
        event = self._ends[(self._steps - 1) % 2]
        deadline = time.monotonic() + timeout_s
        waited = False
        try:
            while not self._runtime.query(event):
                waited = True
                if time.monotonic() >= deadline:
                    raise DeviceError(
                        f"a step still runs on the device after {timeout_s:g} s: if steps are that long, give a "
                        "smaller --batch-tokens; if not, the device hangs: restart the server"
                    )
                time.sleep(POLL_S)
        except DeviceError as error:
            self._note(error)
            raise
        return waited

    def _note(self, error: DeviceError) -> None:
        self._lost = self._lost or error.fatal
        # Whoever calls next is not to be told of it again.
        self._runtime.clear_sticky_error()

    def _each_load(
        self, plan: Plan, layer: int, timeout_s: float, is_settled: Callable[[int, float], bool]
    ) -> None:
        outcome = settle_loads(plan, layer, timeout_s, is_settled)
        if outcome != "ready":
            raise _not_loaded(plan, layer, outcome)

    def close(self) -> None:
        """Ends the Mover. Memory that the device has not let go of is never freed."""
        if not self._mover.close():
            _NEVER_FREED.append(self)
            return
        ends, self._ends = self._ends, ()
        try:
            for event in ends:
                self._runtime.destroy_event(event)
        except DeviceError as error:
            self._note(error)
            _log.warning("the device does not take back its steps' events: %s", error)


def _not_loaded(plan: Plan, layer: int, outcome: str) -> LoadFailedError:
    message = f"layer {layer} of plan {plan.id} was not loaded: {outcome}"
    return LoadFailedError(message, late=outcome == "timeout")
