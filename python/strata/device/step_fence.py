"""The end of every step that was reported, as one event, whatever streams the steps ran on.

What holds: whatever waits for the fence comes after all steps that were reported before it waited. An event has one
record only, so a stream that reports first waits for what the others have reported.
"""

from __future__ import annotations

import threading

from strata.device.cuda_runtime import CudaRuntime, Event, Stream


class StepFence:
    """Before `prepare` and after `close` there is nothing to wait for, and every call does nothing. All methods may be
    called from any thread, and raise DeviceError."""

    def __init__(self, runtime: CudaRuntime) -> None:
        self._runtime = runtime
        # `close`, on another thread, must not destroy the event meanwhile.
        self._lock = threading.Lock()
        self._event = Event(0)
        self._latest: Stream | None = None

    def prepare(self) -> None:
        """Makes the event."""
        with self._lock:
            self._event = self._runtime.create_event()

    def step_done(self, stream: Stream) -> None:
        """A step's last kernel is on `stream`."""
        with self._lock:
            if self._event:
                self._wait(stream)
                self._runtime.record(self._event, stream)
                self._latest = stream

    def hold(self, stream: Stream) -> None:
        """What is put on `stream` from now on waits for every step that was reported."""
        with self._lock:
            if self._event:
                self._wait(stream)

    def _wait(self, stream: Stream) -> None:
        # A stream is behind its own record anyway. Of an event without a record nobody waits.
        if stream != self._latest:
            self._runtime.stream_wait_event(stream, self._event)

    def close(self) -> None:
        """Gives the event back."""
        with self._lock:
            event, self._event = self._event, Event(0)
            if event:
                self._runtime.destroy_event(event)
