"""`CudaRuntime` on a GPU, over CuPy and the CUDA runtime that is loaded beside it. Imports CuPy when it is made.

A failed call is raised once: CuPy clears what its own runtime remembers when it raises.
"""

from __future__ import annotations

import ctypes
import importlib
import time
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from strata.device import kernels
from strata.device.cuda_runtime import DeviceError, Event, KernelCall, MemoryInfo, Stream
from strata.device.kernel_source import BUILT
from strata.errors import ConfigError

_NOT_READY = 600
_SUCCESS = 0
_LOST = frozenset({4, 46, 214, 220, 226, 700, 702, 709, 710, *range(714, 720), 721})
"""Errors after which no call of this process on this device succeeds any more."""
_NON_BLOCKING = 1
_HIGHEST_PRIORITY = -100
"""Lower is higher; CUDA takes what is below its own range as the lowest number of it."""
_NO_TIMING = 2
_PORTABLE_AND_MAPPED = 1 | 2
_ANY_DIRECTION = 4
_CAN_USE_HOST_POINTER = 91
"""Whether kernels reach registered memory under the host's own address."""
_IN_STREAM_ORDER = 1
"""The only order of reading sources that is safe while the device still writes them."""


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _CopyAttributes(ctypes.Structure):
    """`cudaMemcpyAttributes` of CUDA 13."""

    _fields_ = [
        ("source_access_order", ctypes.c_int),
        ("source_hint", _Location),
        ("destination_hint", _Location),
        ("flags", ctypes.c_uint),
    ]


class _ForeignStream:
    """A stream as CuPy 14 takes it over: by the protocol of cuda.core."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def __cuda_stream__(self) -> tuple[int, int]:
        """The protocol's version, and the address."""
        return 0, self._stream


class CupyRuntime:
    """One NVIDIA GPU. Raises ConfigError where CuPy or a usable device is missing."""

    def __init__(self, device: int = 0) -> None:
        try:
            self._cupy: Any = importlib.import_module("cupy")
        except ImportError as error:
            raise ConfigError(
                f"--device cuda needs CuPy ({error}): install the extra `cuda` (EXTRAS=cuda with make), or serve with "
                "--device cpu"
            ) from error
        self._api: Any = self._cupy.cuda.runtime
        self._device = device
        if not torch.cuda.is_available():
            raise ConfigError(
                "--device cuda needs an NVIDIA GPU that torch can use, and there is none (nvidia-smi lists what there "
                "is; torch must be its CUDA build): serve with --device cpu"
            )
        self.bind_thread()
        attribute = self._call(
            "look at the device", self._api.deviceGetAttribute, _CAN_USE_HOST_POINTER, device
        )
        if not attribute:
            raise ConfigError(
                "--device cuda: kernels of this GPU cannot use host memory under its own address; serve with "
                "--device cpu"
            )
        self._functions = self._load_kernels()
        self._streams: dict[Stream, Any] = {}
        self._batch = self._find_batched_copies()

    def _call(self, what: str, function: Any, *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except (self._api.CUDARuntimeError, self._cupy.cuda.driver.CUDADriverError) as error:
            raise DeviceError(f"cannot {what}: {error}", error.status in _LOST) from error

    def _load_kernels(self) -> dict[str, Any]:
        """All kernels by name. CuPy compiles and loads a module when it is first asked for a kernel: now, rather than
        under the first transfer. Raises DeviceError where the driver refuses them, ConfigError where they cannot be
        compiled."""
        try:
            module = self._call("load the copy kernels", kernels.load_module)
            return {
                name: self._call(f"load the kernel {name}", module.get_function, name)
                for name in kernels.kernel_names()
            }
        except ConfigError:
            raise
        except DeviceError as error:
            raise DeviceError(
                f"{error}; if a driver is too old for the cubins of `make cubins`, remove {BUILT} to have CuPy "
                "compile the kernels, or serve with --device cpu",
                error.fatal,
            ) from error
        except Exception as error:  # the compiler's own, or a library of CUDA that is not there
            first = next(iter(str(error).splitlines()), "")
            raise ConfigError(
                f"--device cuda: CuPy cannot compile the copy kernels ({type(error).__name__}: {first}); that needs "
                "NVRTC and the headers of CUDA in the version CuPy was built for: install those, build the kernels "
                "beforehand with `make cubins`, or serve with --device cpu"
            ) from error

    def describe(self) -> str:
        """Its name, compute capability and number of processors."""
        found = torch.cuda.get_device_properties(self._device)
        return f"{found.name} (sm_{found.major}{found.minor}, {found.multi_processor_count} processors)"

    def bind_thread(self) -> None:
        """Makes the device the calling thread's, for CuPy and torch."""
        self._call("use the device", self._api.setDevice, self._device)
        torch.cuda.set_device(self._device)

    def compute_stream(self) -> Stream:
        """torch's current stream of the calling thread."""
        return Stream(torch.cuda.current_stream(self._device).cuda_stream)

    def create_stream(self, urgent: bool = False) -> Stream:
        """A stream that does not wait for the default one; all are equally urgent before CuPy 14."""
        with_priority = getattr(self._api, "streamCreateWithPriority", None)
        if urgent and with_priority is not None:
            made = self._call("make a stream", with_priority, _NON_BLOCKING, _HIGHEST_PRIORITY)
        else:
            made = self._call("make a stream", self._api.streamCreateWithFlags, _NON_BLOCKING)
        stream = Stream(made)
        self._streams[stream] = self._cupy_stream(stream)
        return stream

    def _cupy_stream(self, stream: Stream) -> Any:
        """CuPy's object for a stream that is not its own."""
        from_external = getattr(self._cupy.cuda.Stream, "from_external", None)
        if from_external is None:  # before CuPy 14
            return self._cupy.cuda.ExternalStream(stream, self._device)
        return from_external(_ForeignStream(stream))

    def destroy_stream(self, stream: Stream) -> None:
        """Gives a stream back."""
        self._streams.pop(stream, None)
        self._call("give a stream back", self._api.streamDestroy, stream)

    def create_event(self) -> Event:
        """An event without timing."""
        return Event(self._call("make an event", self._api.eventCreateWithFlags, _NO_TIMING))

    def destroy_event(self, event: Event) -> None:
        """Gives an event back."""
        self._call("give an event back", self._api.eventDestroy, event)

    def record(self, event: Event, stream: Stream) -> None:
        """Queues the event."""
        self._call("record an event", self._api.eventRecord, event, stream)

    def stream_wait_event(self, stream: Stream, event: Event) -> None:
        """What is queued on the stream from now on waits for the event."""
        self._call("make a stream wait", self._api.streamWaitEvent, stream, event)

    def query(self, event: Event) -> bool:
        """Whether the event was reached."""
        status = int(self._api.eventQuery(event))
        if status == _SUCCESS:
            return True
        if status == _NOT_READY:
            return False
        self.clear_sticky_error()
        raise DeviceError(f"the device failed: CUDA error {status}", status in _LOST)

    def launch(self, call: KernelCall, stream: Stream) -> None:
        """Queues a kernel."""
        name, arguments = call.prepared()
        function = self._functions[name]
        # torch's streams come from torch.
        with self._streams.get(stream) or self._cupy_stream(stream):
            self._call(
                f"start the kernel {call.kind}", function, (call.blocks,), (kernels.THREADS,), arguments
            )

    def copy_async(self, destination: int, source: int, size_bytes: int, stream: Stream) -> None:
        """Queues one copy."""
        self._call(
            f"copy {size_bytes} bytes",
            self._api.memcpyAsync,
            destination,
            source,
            size_bytes,
            _ANY_DIRECTION,
            stream,
        )

    @property
    def has_batched_copies(self) -> bool:
        """True with a CUDA runtime from 13.0 on."""
        return self._batch is not None

    def copy_batch(
        self,
        destinations: npt.NDArray[np.uint64],
        sources: npt.NDArray[np.uint64],
        size_bytes: int,
        stream: Stream,
    ) -> None:
        """Queues copies of one size for the copy engine."""
        if self._batch is None:
            raise DeviceError("this CUDA runtime has no batched copies: CUDA 13 has")
        count = len(sources)
        # Each has a name, so that it lives until the call has read it.
        to, come = np.ascontiguousarray(destinations), np.ascontiguousarray(sources)
        sizes = np.full(count, size_bytes, dtype=np.uint64)
        attributes = _CopyAttributes(source_access_order=_IN_STREAM_ORDER)
        first = ctypes.c_size_t(0)
        status = self._batch(
            to.ctypes.data,
            come.ctypes.data,
            sizes.ctypes.data,
            count,
            ctypes.byref(attributes),
            ctypes.byref(first),
            1,
            stream,
        )
        if status != _SUCCESS:
            self.clear_sticky_error()
            raise DeviceError(f"cannot queue {count} batched copies: CUDA error {status}", status in _LOST)

    def _find_batched_copies(self) -> Any:
        """`cudaMemcpyBatchAsync` with the signature of CUDA 13, if the runtime that is loaded has it."""
        self._library: Any = None
        try:
            # The one that torch has loaded, where the names are equal.
            self._library = ctypes.CDLL("libcudart.so.13")
            function = self._library.cudaMemcpyBatchAsync
        except (OSError, AttributeError):
            return None
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        function.argtypes = [pointer, pointer, pointer, size, pointer, pointer, size, pointer]
        function.restype = ctypes.c_int
        return function

    def allocate_device(self, size_bytes: int) -> int:
        """The address of new device memory."""
        return int(self._call(f"allocate {size_bytes} bytes", self._api.malloc, size_bytes))

    def free_device(self, address: int) -> None:
        """Gives device memory back."""
        self._call("free device memory", self._api.free, address)

    def allocate_pinned(self, size_bytes: int) -> int:
        """The address of new pinned host memory."""
        return int(self._call(f"pin {size_bytes} new bytes", self._api.hostAlloc, size_bytes, 1))

    def free_pinned(self, address: int) -> None:
        """Gives pinned memory back."""
        self._call("free pinned memory", self._api.freeHost, address)

    def allocate_pool(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of zeros on the GPU."""
        try:
            pool = torch.zeros(shape, dtype=dtype, device=torch.device("cuda", self._device))
            # The zeros are written on torch's stream, for which the streams of transfers do not wait.
            torch.cuda.synchronize(self._device)
            return pool
        except torch.OutOfMemoryError as error:
            raise DeviceError(str(error).splitlines()[0]) from error

    def register_host(self, address: int, size_bytes: int) -> None:
        """Pins host memory for every context, mapped."""
        self._call(
            f"pin {size_bytes} bytes", self._api.hostRegister, address, size_bytes, _PORTABLE_AND_MAPPED
        )

    def unregister_host(self, address: int) -> None:
        """Unpins it."""
        self._call("unpin host memory", self._api.hostUnregister, address)

    def memory_info(self) -> MemoryInfo:
        """What the driver says is left."""
        free, total = self._call("ask for the free memory", self._api.memGetInfo)
        return MemoryInfo(int(free), int(total))

    def clear_sticky_error(self) -> None:
        """Forgets what the runtime that torch uses remembers; CuPy's own is cleared as it raises."""
        if self._library is not None:
            self._library.cudaGetLastError()

    def synchronize(self, stream: Stream) -> None:
        """Waits until the stream is empty."""
        self._call("wait for a stream", self._api.streamSynchronize, stream)

    def now(self) -> float:
        """The host's monotonic clock."""
        return time.perf_counter()
