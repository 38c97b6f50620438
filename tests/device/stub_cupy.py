"""CuPy as far as `CupyRuntime` touches it, without a GPU: what was called with what, and failures on cue."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any


class CUDARuntimeError(RuntimeError):
    """As CuPy's: it carries the status."""

    def __init__(self, status: int) -> None:
        super().__init__(f"cudaError {status}")
        self.status = status


class CUDADriverError(CUDARuntimeError):
    """As CuPy's."""


class StubCupy(types.ModuleType):
    """`calls` has (name, arguments) of every call; `status` the error that a call of that name ends with."""

    def __init__(self) -> None:
        super().__init__("cupy")
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.status: dict[str, int] = {}
        self.entered: list[int] = []
        runtime = types.SimpleNamespace(CUDARuntimeError=CUDARuntimeError)
        values: dict[str, Any] = {
            "deviceGetAttribute": 1,
            "streamCreateWithFlags": 70,
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
        self.cuda = types.SimpleNamespace(runtime=runtime, driver=driver, ExternalStream=self._stream)

    def _function(self, name: str, value: Any) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.calls.append((name, arguments))
            if name in self.status:
                raise CUDARuntimeError(self.status[name])
            return value

        return call

    @contextlib.contextmanager
    def _stream(self, stream: int, device: int) -> Iterator[None]:
        self.entered.append(stream)
        yield
