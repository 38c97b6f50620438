"""The reader's end of a request. The engine's thread puts, one thread or one event loop reads; the engine never
waits for a slow reader, whose backlog is bounded by the request's own `max_tokens`.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator

import numpy as np
import numpy.typing as npt

from strata.engine.api import Chunk, Progress
from strata.engine.progress import PrefillProgress
from strata.errors import StrataError

_LIVENESS_S = 1.0
"""How often a blocked reader looks whether the engine still lives."""


class Stream:
    """Implements `RequestStream`."""

    def __init__(
        self,
        request_id: int,
        prompt: npt.NDArray[np.uint32],
        abort: Callable[[int], None],
        alive: Callable[[], bool],
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prefill = PrefillProgress(len(prompt))
        """Noted by the engine alone."""
        self._abort = abort
        self._alive = alive
        self._items: deque[Chunk | StrataError] = deque()
        self._changed = threading.Condition()
        self._waiter: asyncio.Future[None] | None = None
        """What a reader on an event loop waits for, while it does."""

    def put(self, item: Chunk | StrataError) -> None:
        """Called by the engine alone: the next piece, or the error that ends the stream."""
        with self._changed:
            self._items.append(item)
            waiter, self._waiter = self._waiter, None
            self._changed.notify_all()
        if waiter is not None:
            try:
                waiter.get_loop().call_soon_threadsafe(_wake, waiter)
            except RuntimeError:
                return  # the reader's loop has closed: nobody is left to read, and the engine goes on

    def abort(self) -> None:
        """Ends the request early. Idempotent; the stream still ends with one `abort` chunk."""
        self._abort(self.request_id)

    def progress(self) -> Progress:
        """How far the prompt is."""
        return self.prefill.report()

    def __iter__(self) -> Iterator[Chunk]:
        while True:
            with self._changed:
                while not self._items:
                    if not self._changed.wait(_LIVENESS_S):
                        self._check_alive()
            chunk = self._take()
            yield chunk
            if chunk.finish_reason is not None:
                return

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        while True:
            while self._items:
                chunk = self._take()
                yield chunk
                if chunk.finish_reason is not None:
                    return
            await self._wait_on_loop()
            self._check_alive()

    async def _wait_on_loop(self) -> None:
        """Returns once there is an item, or after a while. A future and a timer: a task for every token would cost more
        than all else that the server does with it."""
        loop = asyncio.get_running_loop()
        with self._changed:
            if self._items:
                return
            self._waiter = waiter = loop.create_future()
        timer = loop.call_later(_LIVENESS_S, _wake, waiter)
        try:
            await waiter
        finally:
            timer.cancel()

    def _take(self) -> Chunk:
        """The next chunk; raises the error that ends the stream."""
        item = self._items.popleft()
        if isinstance(item, StrataError):
            raise item
        return item

    def _check_alive(self) -> None:
        if not self._items and not self._alive():
            raise StrataError("the engine has stopped before this request was answered")


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
