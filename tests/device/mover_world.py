"""A world around `CudaMover` in which every byte is known: a made-up Core that keeps Core's rules (a page moves only
once its last reader and its writer were reported, and is used again only once its transfer has ended), a model's stream
that lags behind, and a device that runs late. Whatever is read too early, too late or twice shows as a wrong byte.
"""

from __future__ import annotations

import ctypes
import functools
import random
import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from strata.device.cuda import CudaMover, CudaPool
from strata.device.cuda_runtime import DeviceError, Event, Stream
from strata.device.edge import Edge
from strata.device.fake_cuda import FakeCudaRuntime
from strata.device.kernels import Layout
from strata.device.path_choice import Path, PathChoice

LAYERS, PARTS, PIECE = 3, 2, 24
DEVICE_PAGES, HOST_PAGES = 10, 14
ALIGNMENT = 64

KERNELS = PathChoice(((0, Path("kernel", 2)),), ((0, Path("kernel", 1)),))
BATCHES = PathChoice(((0, Path("batch")),), ((0, Path("batch")),))
WHOLE = PathChoice(((0, Path("kernel", 2, whole=True)),), ((0, Path("kernel", 1)),))
WHOLE_BATCHES = PathChoice(((0, Path("batch", whole=True)),), ((0, Path("batch")),))

Pages = npt.NDArray[np.uint32]


@dataclass
class Transfer:
    """One transfer as the queue knows it."""

    kind: str
    source: list[int]
    target: list[int]
    ready: int = 0
    doomed: bool = False
    end: tuple[int, str | None] | None = None
    """Pages whole and the error, once over."""
    cancelled_after: int | None = None
    """How often it is asked about before it says that it is cancelled."""


@dataclass
class Queue:
    """`strata._core.TransferQueue` in a few lines, with everything that was reported."""

    waiting: deque[int] = field(default_factory=deque)
    transfers: dict[int, Transfer] = field(default_factory=dict)
    ended: list[int] = field(default_factory=list)
    closed: list[bool] = field(default_factory=list)

    def submit(self, transfer: Transfer) -> int:
        number = len(self.transfers) + 1
        self.transfers[number] = transfer
        self.waiting.append(number)
        return number

    def take(self, timeout_s: float) -> tuple[int, str, Pages, Pages] | None:
        if not self.waiting or self.closed:
            time.sleep(0.0 if timeout_s < 0.001 else 0.001)
            return None
        loads = [number for number in self.waiting if self.transfers[number].kind == "load"]
        number = loads[0] if loads else self.waiting[0]
        self.waiting.remove(number)
        transfer = self.transfers[number]
        return (
            number,
            transfer.kind,
            np.array(transfer.source, np.uint32),
            np.array(transfer.target, np.uint32),
        )

    def is_cancelled(self, transfer: int) -> bool:
        one = self.transfers[transfer]
        if one.cancelled_after is None:
            return False
        one.cancelled_after -= 1
        return one.cancelled_after < 0

    def layers_ready(self, transfer: int, ready: int) -> None:
        assert self.transfers[transfer].end is None and ready >= self.transfers[transfer].ready
        self.transfers[transfer].ready = ready

    def doom(self, transfer: int, reason: str) -> None:
        self.transfers[transfer].doomed = True

    def done(
        self, transfer: int, pages_whole: int, bytes: int, busy_s: float, error: str | None = None
    ) -> None:
        assert self.transfers[transfer].end is None, "a second completion"
        self.transfers[transfer].end = (pages_whole, error)
        self.ended.append(transfer)

    def cancelled(self, transfer: int, busy_s: float) -> None:
        self.done(transfer, 0, 0, busy_s, "cancelled")

    def close(self, *, torn_down: bool = False) -> None:
        self.closed.append(torn_down)
        if torn_down:
            for number, transfer in self.transfers.items():
                if transfer.end is None:
                    self.done(number, 0, 0, 0.0, "torn down")


class DeafRuntime(FakeCudaRuntime):
    """A fake that ignores one kind of wait or record: what a Mover without it would do."""

    def __init__(self, seed: int, ignored: str | None) -> None:
        super().__init__(seed)
        self.ignored = ignored
        self._roles: dict[Stream, str] = {}
        self._step_event: Event | None = None

    def create_stream(self, urgent: bool = False) -> Stream:
        stream = super().create_stream(urgent)
        self._roles[stream] = ("load", "backup", "compute")[len(self._roles)]
        return stream

    def create_event(self) -> Event:
        event = super().create_event()
        self._step_event = self._step_event or event
        return event

    def record(self, event: Event, stream: Stream) -> None:
        what = "step" if event == self._step_event else self._roles[stream]
        if self.ignored != f"{what} is recorded":
            super().record(event, stream)

    def stream_wait_event(self, stream: Stream, event: Event) -> None:
        what = "step" if event == self._step_event else "layer"
        if self.ignored != f"{self._roles[stream]} waits for {what}":
            super().stream_wait_event(stream, event)


IGNORED = (
    "load waits for step",
    "backup waits for step",
    "compute waits for layer",
    "step is recorded",
    "load is recorded",
    "backup is recorded",
)
"""Every wait and every record that a Mover makes."""


class World:
    """Books of both pools. A page has the number of what it holds, 0 for nothing."""

    def __init__(self, seed: int, runtime: FakeCudaRuntime, choice: PathChoice | None = KERNELS) -> None:
        self.random = random.Random(seed)
        self.runtime = runtime
        self.queue = Queue()
        self.pool = CudaPool.allocate((LAYERS, PARTS, DEVICE_PAGES, PIECE), torch.uint8, runtime)
        self.device_layout = Layout.layer_first(LAYERS, PARTS, DEVICE_PAGES, PIECE)
        self.host_layout = Layout.page_first(LAYERS, PARTS, PIECE, ALIGNMENT)
        size = self.host_layout.page_stride * HOST_PAGES
        self._arena = np.zeros(size + ALIGNMENT, np.uint8)
        start = int(self._arena.ctypes.data)
        self.host_address = start + -start % ALIGNMENT
        self.edge = Edge(
            device_address=self.pool.address,
            device_layout=self.device_layout,
            device_pages=DEVICE_PAGES,
            host_address=self.host_address,
            host_layout=self.host_layout,
            host_pages=HOST_PAGES,
            host_bytes=size,
            layers=LAYERS,
            parts=PARTS,
        )
        self.mover = CudaMover(runtime, self.queue, self.edge, choice, keeps=(self.pool, self._arena))
        self.mover.prepare()
        self.compute = runtime.create_stream()
        self.device = [0] * DEVICE_PAGES
        self.host = [0] * HOST_PAGES
        self.device_busy: dict[int, int] = {}
        self.host_busy: dict[int, int] = {}
        self.contents = 0
        self.settled = 0
        self.wrong: list[str] = []

    # --- bytes -------------------------------------------------------------------------------------------------

    def _address(self, tier: str, layer: int, part: int, page: int) -> int:
        layout = self.device_layout if tier == "device" else self.host_layout
        start = self.pool.address if tier == "device" else self.host_address
        return start + layer * layout.layer_stride + part * layout.part_stride + page * layout.page_stride

    @staticmethod
    @functools.cache
    def _piece(content: int, layer: int, part: int) -> bytes:
        return random.Random((content * LAYERS + layer) * PARTS + part).randbytes(PIECE)

    def write(self, tier: str, page: int, content: int, layer: int) -> None:
        """Writes one layer of a page."""
        for part in range(PARTS):
            ctypes.memmove(self._address(tier, layer, part, page), self._piece(content, layer, part), PIECE)

    def check(self, tier: str, page: int, content: int, layer: int, when: str) -> None:
        """Notes a page that does not hold what it should."""
        for part in range(PARTS):
            found = ctypes.string_at(self._address(tier, layer, part, page), PIECE)
            if found != self._piece(content, layer, part):
                self.wrong.append(f"{when}: {tier} page {page}, layer {layer}, part {part}")

    # --- what happens ------------------------------------------------------------------------------------------

    def run(self, actions: int) -> list[str]:
        """So many random things, then everything comes to an end; what was wrong."""
        choices = [self.step, self.step, self.back_up, self.load, self.load, self.fill_host, self.settle]
        try:
            for _ in range(actions):
                self.random.choice(choices)()
                if self.random.random() < 0.7:
                    self.mover.look()
            self.finish()
        except DeviceError as error:
            # A mutation may well read a page table that is not there yet.
            self.wrong.append(f"the device failed: {error}")
        return self.wrong

    def finish(self) -> None:
        """Lets everything end and compares all that both tiers hold."""
        self.begin_all()
        while self.device_busy and self.mover.problem is None:
            self.runtime.drain()
            self.mover.look()
            self.settle()
        self.runtime.drain()
        if self.mover.problem is not None:
            raise DeviceError(self.mover.problem)
        for tier, pages, busy in (
            ("device", self.device, self.device_busy),
            ("host", self.host, self.host_busy),
        ):
            for page, content in enumerate(pages):
                if content and page not in busy:
                    for layer in range(LAYERS):
                        self.check(tier, page, content, layer, "in the end")

    def begin_all(self) -> None:
        """Lets the Mover take what waits."""
        for _ in range(1000):
            if not self.queue.waiting:
                return
            self.mover.look()
            if self.mover.problem is not None:
                break
        raise DeviceError(f"nobody takes {len(self.queue.waiting)} transfers: {self.mover.problem}")

    def step(self) -> None:
        """A batch: layer by layer it reads some pages, those on their way too, and writes new ones."""
        self.begin_all()
        held = [page for page, content in enumerate(self.device) if content]
        reads = self.random.sample(held, min(len(held), self.random.randint(0, 4)))
        free = [
            page for page in range(DEVICE_PAGES) if not self.device[page] and page not in self.device_busy
        ]
        writes = self.random.sample(free, min(len(free), self.random.randint(0, 2)))
        new = {}
        for page in writes:
            self.contents += 1
            new[page] = self.contents
        for layer in range(LAYERS):
            for page in reads:
                self._wait(page, layer)
            for page in reads:
                self._queue_check(page, self.device[page], layer)
            for page, content in new.items():
                self._queue_write(page, content, layer)
        self.mover.step_done(self.compute)
        for page, content in new.items():
            self.device[page] = content
        for page in reads:
            if page not in self.device_busy and self.random.random() < 0.5:
                self.device[page] = 0

    def _wait(self, page: int, layer: int) -> None:
        number = self.device_busy.get(page)
        if number is None or self.queue.transfers[number].kind != "load":
            return
        if self.queue.transfers[number].ready <= layer and not self.mover.wait_layer(
            number, layer, self.compute, 0.0
        ):
            transfer = self.queue.transfers[number]
            assert transfer.ready > layer or transfer.end is not None, "a load that was begun is not there"

    def _queue_check(self, page: int, content: int, layer: int) -> None:
        self.runtime.run(self.compute, lambda: self.check("device", page, content, layer, "read by a step"))

    def _queue_write(self, page: int, content: int, layer: int) -> None:
        self.runtime.run(self.compute, lambda: self.write("device", page, content, layer))

    def back_up(self) -> None:
        """Pages that are whole by the books go down."""
        self._move("backup", self.device, self.device_busy, self.host, self.host_busy)

    def load(self) -> None:
        """Pages go up; some of these loads are cancelled, and nobody counts on them."""
        self._move("load", self.host, self.host_busy, self.device, self.device_busy)

    def _move(
        self,
        kind: str,
        source: list[int],
        source_busy: dict[int, int],
        target: list[int],
        target_busy: dict[int, int],
    ) -> None:
        held = [page for page, content in enumerate(source) if content and page not in source_busy]
        free = [page for page, content in enumerate(target) if not content and page not in target_busy]
        count = self.random.randint(0, min(len(held), len(free), 4))
        if not count:
            return
        moved, places = self.random.sample(held, count), self.random.sample(free, count)
        transfer = Transfer(kind, moved, places)
        if self.random.random() < 0.15:
            transfer.cancelled_after = self.random.randint(0, LAYERS)
        number = self.queue.submit(transfer)
        for page, place in zip(moved, places, strict=True):
            source_busy[page] = target_busy[place] = number
            if kind == "load" and transfer.cancelled_after is None:
                target[place] = source[page]

    def fill_host(self) -> None:
        """The disk brings a page: the host writes it."""
        free = [page for page in range(HOST_PAGES) if not self.host[page] and page not in self.host_busy]
        if free:
            page = self.random.choice(free)
            self.contents += 1
            self.host[page] = self.contents
            for layer in range(LAYERS):
                self.write("host", page, self.contents, layer)

    def settle(self) -> None:
        """Takes in what has ended: bytes are there at that moment, and pages may be used again."""
        for number in self.queue.ended[self.settled :]:
            self.settled += 1
            transfer = self.queue.transfers[number]
            load = transfer.kind == "load"
            devices, hosts = (
                (transfer.target, transfer.source) if load else (transfer.source, transfer.target)
            )
            assert transfer.end is not None
            whole = transfer.end[1] is None
            for device, host in zip(devices, hosts, strict=True):
                del self.device_busy[device], self.host_busy[host]
                if whole:
                    content = self.host[host] if load else self.device[device]
                    (self.device if load else self.host)[device if load else host] = content
                    for layer in range(LAYERS):
                        self.check(
                            "device" if load else "host", device if load else host, content, layer, "ended"
                        )
                elif load:
                    self.device[device] = 0
                if load and self.random.random() < 0.5:
                    self.host[host] = 0
