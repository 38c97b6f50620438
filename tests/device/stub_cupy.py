"""CuPy as far as `CupyRuntime` touches it, without a GPU: what was called with what, and failures on cue."""

from __future__ import annotations

import types
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from typing import Any


class CUDARuntimeError(RuntimeError):
    """As CuPy's: it carries the status."""

    def __init__(self, status: int) -> None:
        super().__init__(f"cudaError {status}")
        self.status = status


class CUDADriverError(CUDARuntimeError):
    """As CuPy's."""


class CompileException(Exception):
    """As CuPy's: no RuntimeError."""


class TakenOver:
    """A stream of CuPy's that wraps another; may be entered again and again."""

    def __init__(self, address: int, entered: list[int]) -> None:
        self._address = address
        self._entered = entered

    def __enter__(self) -> None:
        self._entered.append(self._address)

    def __exit__(self, *error: object) -> None:
        pass


class StubCupy(types.ModuleType):
    """`calls` has (name, arguments) of every call; `status` the error that a call of that name ends with. `made` and
    `entered` are the streams that were taken over and those that were the current one for a while."""

    def __init__(self) -> None:
        super().__init__("cupy")
        self.__spec__ = ModuleSpec("cupy", None)
        self.__version__ = "14.2.0"
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.status: dict[str, int] = {}
        self.made: list[int] = []
        self.entered: list[int] = []
        runtime = types.SimpleNamespace(CUDARuntimeError=CUDARuntimeError)
        values: dict[str, Any] = {
            "deviceGetAttribute": 1,
            "streamCreateWithFlags": 70,
            "streamCreateWithPriority": 71,
            "eventCreateWithFlags": 80,
            "malloc": 90,
            "hostAlloc": 91,
            "memGetInfo": (3, 10),
        }
        names = [
            "setDevice",
            "streamDestroy",
            "eventDestroy",
            "eventRecord",
            "streamWaitEvent",
            "memcpyAsync",
        ]
        names += ["free", "freeHost", "hostRegister", "hostUnregister", "streamSynchronize", *values]
        for name in names:
            setattr(runtime, name, self._function(name, values.get(name)))
        runtime.eventQuery = lambda event: self.status.get("eventQuery", 0)
        driver = types.SimpleNamespace(CUDADriverError=CUDADriverError)
        self.cuda = types.SimpleNamespace(runtime=runtime, driver=driver)
        self.be_version(14)

    def be_version(self, major: int) -> None:
        """From 14 on streams are taken over by `Stream.from_external`, and may have a priority."""
        stream = types.SimpleNamespace()
        self.cuda.Stream = stream
        if major >= 14:
            stream.from_external = lambda foreign: self._stream(*foreign.__cuda_stream__()[1:])
        else:
            self.cuda.ExternalStream = lambda address, device: self._stream(address)
            del self.cuda.runtime.streamCreateWithPriority

    def _function(self, name: str, value: Any) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.calls.append((name, arguments))
            if name in self.status:
                raise CUDARuntimeError(self.status[name])
            return value

        return call

    def _stream(self, address: int) -> TakenOver:
        self.made.append(address)
        return TakenOver(address, self.entered)
