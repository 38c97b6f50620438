"""`CupyRuntime` against a stub of CuPy: what it asks of CUDA and how it reads the answers. No GPU speaks here."""

from __future__ import annotations

import ctypes
import importlib
import sys
import types

import numpy as np
import pytest
import torch
from stub_cupy import CompileException, CUDADriverError, StubCupy

from strata.config import StrataConfig
from strata.device import cupy_runtime, kernels
from strata.device.cuda_runtime import DeviceError, Event, KernelCall, Stream
from strata.device.cupy_runtime import CupyRuntime
from strata.engine.engine import Engine
from strata.errors import ConfigError

ILLEGAL_ADDRESS, INVALID_VALUE, NOT_READY = 700, 1, 600


class Kernels:
    """A module of kernels that notes its launches; `error` is what asking for a kernel ends with."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.launched: list[tuple[str, tuple[int, ...], tuple[int, ...], int]] = []
        self.asked: list[str] = []

    def get_function(self, name: str) -> object:
        self.asked.append(name)
        if self.error is not None:
            raise self.error

        def launch(grid: tuple[int, ...], block: tuple[int, ...], arguments: tuple[np.ndarray]) -> None:
            self.launched.append((name, grid, block, int(arguments[0]["count"][0])))

        return launch


@pytest.fixture
def module() -> Kernels:
    """The kernels that are there to be loaded."""
    return Kernels()


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch, module: Kernels) -> StubCupy:
    """The stub in CuPy's place, beside a torch that believes in a GPU."""
    stub = StubCupy()
    monkeypatch.setitem(sys.modules, "cupy", stub)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(kernels, "load_module", lambda: module)
    return stub


def test_commands_reach_cuda_as_they_are(cupy: StubCupy) -> None:
    runtime = CupyRuntime()
    stream, event = runtime.create_stream(), runtime.create_event()
    cupy.calls.clear()
    runtime.record(event, stream)
    runtime.stream_wait_event(stream, event)
    runtime.copy_async(1, 2, 3, stream)
    runtime.register_host(4096, 8192)
    assert cupy.calls == [
        ("eventRecord", (event, stream)),
        ("streamWaitEvent", (stream, event)),
        ("memcpyAsync", (1, 2, 3, 4, stream)),
        ("hostRegister", (4096, 8192, 3)),
    ]
    assert runtime.memory_info().free == 3


@pytest.mark.parametrize("version", [13, 14])
def test_urgent_streams_have_the_highest_priority_that_can_be_had(cupy: StubCupy, version: int) -> None:
    cupy.be_version(version)
    runtime = CupyRuntime()
    cupy.calls.clear()
    runtime.create_stream()
    runtime.create_stream(urgent=True)
    non_blocking, lowest_number = 1, -100
    usual = ("streamCreateWithFlags", (non_blocking,))
    urgent = ("streamCreateWithPriority", (non_blocking, lowest_number))
    assert cupy.calls == [usual, urgent if version == 14 else usual]


def test_a_query_tells_late_from_lost(cupy: StubCupy) -> None:
    runtime = CupyRuntime()
    assert runtime.query(Event(1))
    cupy.status["eventQuery"] = NOT_READY
    assert not runtime.query(Event(1))
    for status, fatal in ((ILLEGAL_ADDRESS, True), (INVALID_VALUE, False)):
        cupy.status["eventQuery"] = status
        with pytest.raises(DeviceError, match=str(status)) as failed:
            runtime.query(Event(1))
        assert failed.value.fatal is fatal


def test_a_refusal_says_what_was_asked_for(cupy: StubCupy) -> None:
    runtime = CupyRuntime()
    cupy.status["hostRegister"] = INVALID_VALUE
    with pytest.raises(DeviceError, match="cannot pin 8192 bytes: cudaError 1") as refused:
        runtime.register_host(4096, 8192)
    assert not refused.value.fatal


@pytest.mark.parametrize("version", [13, 14])
def test_a_launch_takes_the_widest_kernel_on_the_stream(
    cupy: StubCupy, module: Kernels, version: int
) -> None:
    cupy.be_version(version)
    runtime = CupyRuntime()
    assert sorted(module.asked) == sorted(kernels.kernel_names()), "a kernel is loaded under a transfer"
    module.asked.clear()
    layout = kernels.Layout.layer_first(2, 2, 8, 48)
    host = kernels.Layout.page_first(2, 2, 48, 4096)
    call = KernelCall("load_layer", 1 << 20, 1 << 30, layout, host, 64, 96, 5, 1, 2, 2, 3)
    stream = runtime.create_stream()
    runtime.launch(call, stream)
    runtime.launch(call, stream)
    assert module.launched == [("strata_load_layer_w16_i32", (3,), (1024,), 5)] * 2
    assert module.asked == [] and cupy.entered == [stream] * 2
    assert cupy.made == [stream], "a stream is taken over once"
    runtime.launch(call, Stream(77))
    assert cupy.entered[-1] == 77, "a stream of torch's"
    runtime.destroy_stream(stream)
    assert runtime._streams == {}


@pytest.mark.parametrize(
    "error",
    [CompileException("no such header\n(1000 lines)"), RuntimeError("no libnvrtc"), OSError("no file")],
)
def test_kernels_that_cannot_be_compiled_are_told_at_the_start(
    cupy: StubCupy, module: Kernels, error: Exception
) -> None:
    module.error = error
    first = str(error).splitlines()[0]
    with pytest.raises(ConfigError, match=f"{first}\\).*make cubins.*--device cpu"):
        CupyRuntime()


def test_kernels_that_the_driver_refuses_are_told_at_the_start(cupy: StubCupy, module: Kernels) -> None:
    no_image = 209
    module.error = CUDADriverError(no_image)
    with pytest.raises(DeviceError, match=r"cannot load the kernel strata_.*209.*--device cpu") as refused:
        CupyRuntime()
    assert not refused.value.fatal


def test_batched_copies_have_cuda_13s_signature(cupy: StubCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ctypes.sizeof(cupy_runtime._CopyAttributes) == 24
    seen: list[tuple[list[int], list[int], list[int], int, int, int]] = []

    def batch(
        destinations: int,
        sources: int,
        sizes: int,
        count: int,
        attributes: object,
        first: object,
        kinds: int,
        stream: int,
    ) -> int:
        def column(address: int) -> list[int]:
            return list((ctypes.c_uint64 * count).from_address(address))

        order = attributes._obj.source_access_order  # type: ignore[attr-defined]
        seen.append((column(destinations), column(sources), column(sizes), order, kinds, stream))
        return 0 if stream == 7 else INVALID_VALUE

    library = types.SimpleNamespace(cudaMemcpyBatchAsync=batch, cudaGetLastError=lambda: 0)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    runtime = CupyRuntime()
    assert runtime.has_batched_copies
    to, of = np.array([10, 20], np.uint64), np.array([30, 40], np.uint64)
    runtime.copy_batch(to, of, 5, Stream(7))
    in_stream_order = 1
    assert seen == [([10, 20], [30, 40], [5, 5], in_stream_order, 1, 7)]
    seen.clear()
    every_second = np.arange(10, 50, 5, dtype=np.uint64)
    runtime.copy_batch(every_second[::4], every_second[1::4], 5, Stream(7))
    assert seen == [([10, 30], [15, 35], [5, 5], in_stream_order, 1, 7)], (
        "a copy was freed before it was read"
    )
    with pytest.raises(DeviceError, match="2 batched copies"):
        runtime.copy_batch(to, of, 5, Stream(8))


def test_without_batched_copies_it_says_so(cupy: StubCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_there(name: str) -> object:
        raise OSError(f"{name}: no such library")

    monkeypatch.setattr(ctypes, "CDLL", none_there)
    runtime = CupyRuntime()
    assert not runtime.has_batched_copies
    with pytest.raises(DeviceError, match="CUDA 13"):
        runtime.copy_batch(np.zeros(1, np.uint64), np.zeros(1, np.uint64), 4, Stream(1))
    runtime.clear_sticky_error()


def test_without_cupy_or_a_gpu_the_remedy_is_named(cupy: StubCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"needs an NVIDIA GPU.*--device cpu"):
        CupyRuntime()

    def no_cupy(name: str) -> types.ModuleType:
        raise ImportError("No module named 'cupy'")

    monkeypatch.setattr(importlib, "import_module", no_cupy)
    with pytest.raises(ConfigError, match=r"extra `cuda`.*--device cpu"):
        # Before any model is loaded: the default one is not on this machine.
        Engine(StrataConfig.of(device="cuda", model="no such model"))


def test_a_gpu_that_cannot_reach_host_memory_is_refused(cupy: StubCupy) -> None:
    cupy.cuda.runtime.deviceGetAttribute = lambda attribute, device: 0
    with pytest.raises(ConfigError, match="--device cpu"):
        CupyRuntime()
