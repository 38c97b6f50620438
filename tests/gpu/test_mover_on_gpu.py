"""The Mover on a GPU: pages go down and come back with their bytes, layers become ready in order, refusals are told.
The same on the fake device, which shows that these tests are sound where there is no GPU.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
import torch
from mover_world import BATCHES, KERNELS, WHOLE, WHOLE_BATCHES, Queue, Transfer

from strata.device.cuda import CudaMover, CudaPool
from strata.device.cuda_runtime import CudaRuntime, DeviceError, Stream
from strata.device.cupy_runtime import CupyRuntime
from strata.device.edge import Edge
from strata.device.fake_cuda import FakeCudaRuntime
from strata.device.host_registration import HostRegistration
from strata.device.kernels import Layout
from strata.errors import CapacityError

LAYERS, PARTS, PAGES, MOVED = 4, 2, 24, 10
PIECE = 2048 if torch.cuda.is_available() else 32
ALIGNMENT = 4096
LIMIT_S = 20.0


@pytest.fixture(params=[pytest.param("gpu", marks=pytest.mark.gpu), "fake"])
def runtime(request: pytest.FixtureRequest) -> CudaRuntime:
    return CupyRuntime() if request.param == "gpu" else FakeCudaRuntime(1)


@pytest.fixture
def gpu() -> CupyRuntime:
    return CupyRuntime()


@dataclass
class Rig:
    """A Mover between a pool and an arena."""

    runtime: CudaRuntime
    queue: Queue
    pool: CudaPool
    arena: npt.NDArray[np.uint8]
    mover: CudaMover

    def wait(self, transfer: int) -> Transfer:
        """Until the transfer has ended."""
        deadline = time.monotonic() + LIMIT_S
        found = self.queue.transfers[transfer]
        while found.end is None:
            assert time.monotonic() < deadline, f"transfer {transfer} has not ended: {self.mover.problem}"
            time.sleep(0.001)
        return found

    def order(self, number: int, layer: int, stream: Stream) -> None:
        """Puts `stream` behind a layer of a load, as the engine does: one that has ended is not to be found there."""
        deadline = time.monotonic() + LIMIT_S
        while not self.mover.wait_layer(number, layer, stream, 0.001):
            if self.queue.transfers[number].end is not None:
                return
            assert time.monotonic() < deadline, "a load that does not begin"


CHOICES = {
    "kernels": KERNELS,
    "kernels at once": WHOLE,
    "batches": BATCHES,
    "batches at once": WHOLE_BATCHES,
    "measured": None,
}


@pytest.fixture(params=CHOICES)
def rig(request: pytest.FixtureRequest, runtime: CudaRuntime) -> Iterator[Rig]:
    if request.param == "measured" and isinstance(runtime, FakeCudaRuntime):
        pytest.skip(
            "nothing is to be learnt from the speed of a fake device; the Mover's own tests measure one"
        )
    choice = CHOICES[request.param]
    if choice is not None and choice.loads[0][1].kind == "batch" and not runtime.has_batched_copies:
        pytest.skip("this CUDA runtime has no batched copies: CUDA 13 has")
    queue = Queue()
    pool = CudaPool.allocate((LAYERS, PARTS, PAGES, PIECE), torch.uint8, runtime)
    host_layout = Layout.page_first(LAYERS, PARTS, PIECE, ALIGNMENT)
    stride = host_layout.page_stride
    whole = np.zeros(PAGES * stride + ALIGNMENT, np.uint8)
    start = -whole.ctypes.data % ALIGNMENT
    arena = whole[start : start + PAGES * stride]
    edge = Edge(
        device_address=pool.address,
        device_layout=Layout.layer_first(LAYERS, PARTS, PAGES, PIECE),
        device_pages=PAGES,
        host_address=int(arena.ctypes.data),
        host_layout=host_layout,
        host_pages=PAGES,
        host_bytes=len(arena),
        layers=LAYERS,
        parts=PARTS,
    )
    mover = CudaMover(runtime, queue, edge, choice)
    mover.start()
    yield Rig(runtime, queue, pool, arena, mover)
    mover.close()


def test_pages_come_back_with_their_bytes(rig: Rig) -> None:
    draw = np.random.default_rng(2)
    shape = tuple(rig.pool.tensor.shape)
    rig.pool.tensor.copy_(torch.from_numpy(draw.integers(0, 256, shape, np.uint8)))
    written = rig.pool.tensor.clone()
    rig.mover.step_done(rig.runtime.compute_stream())
    source, kept = draw.permutation(PAGES)[:MOVED].tolist(), draw.permutation(PAGES)[:MOVED].tolist()
    done = rig.wait(rig.queue.submit(Transfer("backup", source, kept)))
    assert done.end == (MOVED, None)
    pages = rig.arena.reshape(PAGES, -1)[kept, : LAYERS * PARTS * PIECE]
    on_host = pages.reshape(MOVED, LAYERS, PARTS, PIECE)
    assert np.array_equal(on_host, written[:, :, source].movedim(2, 0).cpu().numpy())
    rig.pool.tensor.zero_()
    rig.mover.step_done(rig.runtime.compute_stream())
    target = draw.permutation(PAGES)[:MOVED].tolist()
    number = rig.queue.submit(Transfer("load", kept, target))
    stream = rig.runtime.compute_stream()
    for layer in range(LAYERS):
        # What is queued on the stream after the wait finds the layer's bytes; looking at them here waits for it.
        rig.order(number, layer, stream)
        rig.runtime.synchronize(stream)
        assert torch.equal(rig.pool.tensor[layer][:, target], written[layer][:, source])
    loaded = rig.wait(number)
    assert loaded.end == (MOVED, None) and loaded.ready == LAYERS
    untouched = [page for page in range(PAGES) if page not in target]
    assert not rig.pool.tensor[:, :, untouched].any(), "a page that nobody asked for was written"


def test_many_transfers_end_once_each(rig: Rig) -> None:
    rig.pool.tensor.fill_(7)
    rig.mover.step_done(rig.runtime.compute_stream())
    numbers = [
        rig.queue.submit(Transfer("backup" if turn % 2 else "load", [turn], [turn])) for turn in range(PAGES)
    ]
    assert all(rig.wait(number).end == (1, None) for number in numbers)
    assert sorted(rig.queue.ended) == numbers and rig.mover.problem is None


@pytest.mark.gpu
def test_memory_that_cannot_be_pinned_is_told_with_its_sizes(gpu: CupyRuntime) -> None:
    """A span that is pinned already is refused as one that is too large would be."""
    size = 1 << 22
    span = np.zeros(size + ALIGNMENT, np.uint8)
    address = int(span.ctypes.data) + -int(span.ctypes.data) % ALIGNMENT
    gpu.register_host(address, size)
    try:
        with pytest.raises(
            CapacityError, match=r"4,194,304 bytes of --host-memory.*ulimit -l.*smaller --host-memory"
        ):
            HostRegistration(gpu, address, size, 4096).pin()
        # Nothing of it sticks: the next call of anybody works.
        assert int(torch.ones(3, device="cuda").sum()) == 3
        gpu.synchronize(gpu.compute_stream())
    finally:
        gpu.unregister_host(address)


@pytest.mark.gpu
def test_a_pool_that_does_not_fit_is_told_with_what_is_left(gpu: CupyRuntime) -> None:
    with pytest.raises(CapacityError, match="smaller --device-memory"):
        CudaPool.allocate((1 << 50,), torch.uint8, gpu)
    assert int(torch.ones(3, device="cuda").sum()) == 3


@pytest.mark.gpu
def test_a_copy_that_makes_no_sense_is_an_error_and_no_end(gpu: CupyRuntime) -> None:
    stream = gpu.create_stream()
    with pytest.raises(DeviceError):
        gpu.register_host(0, 1 << 20)
    buffer = gpu.allocate_pinned(16)
    device = gpu.allocate_device(16)
    ctypes.memset(buffer, 5, 16)
    gpu.copy_async(device, buffer, 16, stream)
    ctypes_back = gpu.allocate_pinned(16)
    gpu.copy_async(ctypes_back, device, 16, stream)
    gpu.synchronize(stream)
    assert ctypes.string_at(ctypes_back, 16) == b"\x05" * 16
    gpu.free_pinned(buffer)
    gpu.free_pinned(ctypes_back)
    gpu.free_device(device)
    gpu.destroy_stream(stream)
