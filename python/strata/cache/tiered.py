"""The cache alone, over all tiers, for engines that schedule for themselves: device pages in the engine's own pool,
host memory and disk behind them.

What holds: a page that matches has exactly the bytes that were committed for its tokens; what comes from host or disk
is there, layer by layer, when `Ticket.wait_layer` returns; a fault makes a shorter match or an error in words, never
wrong bytes. No wait is longer than its `timeout_s`, but for one: room on the device is waited for up to ten seconds
while pages on their way down will make all of it. Whoever waits when the cache is closed, or fails, gets a StrataError
with the reason at once. Source: section 3 of the Strata paper (layer-first and page-first layouts, overlapped loads,
write policies); the decisions are those of `strata serve`, made by the same Core.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from strata._core import Lease
from strata.cache.ids import id_array
from strata.cache.tiers import Tiers
from strata.errors import LoadFailedError, RequestError

Tokens = Sequence[int] | npt.NDArray[Any]
Pages = Sequence[int] | npt.NDArray[Any]
_CONFIRM_S = 30.0
"""How long a commit waits for a device to say that its loads are over."""


class TieredCache(Tiers):
    """A prefix cache over device, host and disk.

    `pool` is a contiguous torch tensor or a numpy array, `[layers, parts, pages, page_size, ...]` (parts: K and
    V). It is the device tier and stays the caller's; Strata writes only into pages that it has not handed out. What is
    committed is backed up to `host_memory` bytes of RAM and written to `disk_path` (at most `disk_capacity` bytes) as
    `write_policy` and `disk_write_policy` say; `identity` names the weights and is required with a disk. Sizes may read
    "2GiB"; other `settings` are the fields of `strata.config.CacheOptions`. May be shared between threads.

    A pool on a GPU needs `carrier=strata.CudaCarrier`; its engine computes on torch's current stream. There may be
    several: where pages are handed out or given back, a stream waits for the steps that others have reported.

    Raises ConfigError (pool of another shape, settings), CapacityError (memory, threads), StorageError (disk).
    """

    def match(self, tokens: Tokens, salt: str = "") -> TieredMatch:
        """Finds the longest cached prefix of whole pages, in any tier, and pins it. Entries of two salts never match.

        An engine needs the logits of the last token, so it gives the tokens before that one. Raises RequestError for
        what are no tokens, and after `close`.
        """
        return TieredMatch(self, self.runtime.lease(id_array(tokens, "tokens"), salt))

    def __enter__(self) -> TieredCache:
        return self


class TieredMatch:
    """One sequence of the engine: what was found of it, then what is loaded, reserved and committed.

    `tokens` cached tokens were found: `on_device`, `on_host` (there alone) and `on_disk` (there alone) of them. Until
    `release`, or the end of the `with` block, none of its pages is evicted or used for anything else; what was reserved
    and not committed is free afterwards. A match that is forgotten is released too, but on a GPU without a thought of
    what still computes there. Its methods may be called from any thread; on a GPU from those that compute, since what
    is on the calling thread's stream is what pages wait for.
    """

    def __init__(self, cache: TieredCache, lease: Lease) -> None:
        self._cache = cache
        self._lease = lease
        size = lease.page_size
        self.on_device, self.on_host, self.on_disk = (pages * size for pages in lease.found)
        self.tokens = self.on_device + self.on_host + self.on_disk

    @property
    def load_s(self) -> float | None:
        """Seconds that `load` is predicted to take, from what transfers took so far; None while too little is known.
        Whether that is worth it is the engine's decision: loading what is computed faster is a loss."""
        return self._lease.load_s

    def load(self, tokens: int | None = None, timeout_s: float = 30.0) -> Ticket:
        """Begins to bring the prefix to the device, its first `tokens` tokens at most, in whole pages. Returns at once.

        Pages that the disk has not given within `timeout_s` seconds end the prefix; they are computed like any others.
        Where the device has no room (`Ticket.pages` raises CapacityError), nothing was loaded: load again later, or
        compute and commit. Raises RequestError for any other second time, and after `commit`.
        """
        most = self.tokens if tokens is None else min(tokens, self.tokens)
        if most < 0:
            raise RequestError(f"{tokens} tokens cannot be loaded: give 0 or more, or nothing for all")
        self._cache.ensure_open()
        self._lease.load(most // self._lease.page_size, timeout_s)
        return Ticket(self, self._cache, self._lease, timeout_s)

    def reserve(self, count: int, timeout_s: float = 0.0) -> npt.NDArray[np.uint32]:
        """`count` page ids (uint32) to compute into, the least recently used evicted. They are this match's alone.
        Waits for room at most `timeout_s` seconds; longer, up to ten seconds in all, only while pages on their way down
        will make all the room that is needed (the write policy `back` copies before it evicts). Raises CapacityError
        if pinned and reserved pages leave too little, RequestError after `release`, StrataError if the cache is closed
        meanwhile."""
        self._cache.ensure_open()
        if not 0 <= count < 2**32:
            raise RequestError(f"{count} pages cannot be reserved: give 0 or more")
        pages = self._lease.reserve(count, timeout_s)
        self._cache.step_begins()
        return pages

    def commit(self, tokens: Tokens, pages: Pages) -> list[int]:
        """Makes reserved `pages`, whose K/V is written in all layers, match for everybody: they hold the whole pages of
        `tokens` after those that this match has loaded or committed. `tokens` is the whole sequence from its start.

        From then on the write policies copy them down. Returns those for which the cache had others already: they stay
        this match's to read, and are free after it. Raises RequestError for pages that are not reserved (any more), for
        a number of pages that is not that of the tokens, for tokens that do not go on from what is held, and while a
        load of this match is under way or after it failed; then nothing has changed.
        """
        self._cache.ensure_open()
        self._cache.step_done()
        if self._cache.carrier is not None and self._lease.loads:
            # What a device computes behind the calls must not be published on a load that may still fail.
            self._lease.wait_layer(self._cache.pool.layers - 1, _CONFIRM_S)
        return self._lease.commit(id_array(tokens, "tokens"), id_array(pages, "pages"))

    def abort(self, pages: Pages) -> None:
        """Gives reserved pages back unused, all or none. Raises RequestError for a page that is not reserved."""
        self._cache.ensure_open()
        self._cache.step_done()
        self._lease.abort(id_array(pages, "pages"))

    def release(self) -> None:
        """Lets everything go; a load under way is cancelled unless others wait for it. Idempotent."""
        try:
            self._cache.step_done()
        finally:
            self._lease.release()

    def __enter__(self) -> TieredMatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Ticket:
    """A load under way. Any thread may wait on it."""

    def __init__(self, match: TieredMatch, cache: TieredCache, lease: Lease, timeout_s: float) -> None:
        self._match = match
        self._cache = cache
        self._carrier = cache.carrier
        self._lease = lease
        self._layers = cache.pool.layers
        self._timeout_s = timeout_s

    def pages(self, timeout_s: float | None = None) -> npt.NDArray[np.uint32]:
        """The page table (uint32) of the prefix that is loaded, first page first. Known at once unless pages come from
        disk; what does not come from there is left out, so it may be shorter than what was found.

        Waits at most `timeout_s` seconds, by default those given to `load` and one more. Raises CapacityError if the
        device has no room for it, LoadFailedError if it is not known in time: room is waited for as in `reserve`.
        """
        limit = self._timeout_s + 1.0 if timeout_s is None else timeout_s
        pages = self._lease.pages(limit)
        if pages is None:
            raise LoadFailedError(
                f"the pages are not known after {limit:g} s: the disk, or room on the device, is still waited for; "
                "wait on, or release",
                late=True,
            )
        self._cache.step_begins()
        return pages

    @property
    def tokens(self) -> int:
        """Tokens in `pages()`, which it waits for."""
        return len(self.pages()) * self._lease.page_size

    def wait_layer(self, layer: int, timeout_s: float = 30.0) -> None:
        """Returns once layer `layer` of all pages is on the device: an atomic read if it is there already. Raises
        LoadFailedError if it does not come (`late`: not within `timeout_s` seconds), and as `pages`. A failed load is
        void: release the match, and match again."""
        if not 0 <= layer < self._layers:
            raise RequestError(f"layer {layer} is none of the pool's {self._layers}")
        outcome = self._wait(layer, timeout_s)
        if outcome != "ready":
            late = outcome == "timeout"
            why = f"it was not there after {timeout_s:g} s" if late else "its transfer failed"
            raise LoadFailedError(
                f"layer {layer} was not loaded: {why}; release the match and match again", late
            )

    def _wait(self, layer: int, timeout_s: float) -> str:
        if self._carrier is None:
            return self._lease.wait_layer(layer, timeout_s)
        deadline = time.monotonic() + timeout_s
        if self._lease.pages(timeout_s) is None:
            return "timeout"
        return self._carrier.wait_layer(self._lease, layer, max(0.0, deadline - time.monotonic()))

    def wait(self, timeout_s: float = 30.0) -> None:
        """Returns once all layers are on the device. Raises as `wait_layer`."""
        self.wait_layer(self._layers - 1, timeout_s)

    def done(self) -> bool:
        """Whether all layers are there, without waiting. False for a load that failed; raises as `pages` for one that
        has not begun."""
        return self._lease.wait_layer(self._layers - 1, 0.0) == "ready"

    def cancel(self) -> None:
        """Gives the load up, and with it its match. What is under way ends or is thrown away; nobody ever sees it."""
        self._match.release()
