"""An order of the queue in Python: write one class with one method, and simulate the production scheduler with it.

The batch itself (room, chunks of prompts, bounds, decoding) is formed by the production code as for `fcfs`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol


class WaitingRequest(NamedTuple):
    """One request that waits and may go. Times are seconds of the simulation's clock; tokens are those of its prompt.

    `compute_tokens` are those that it would compute if it went now; `transient_tokens`, of those, are being computed or
    will be computed by another request, and `disk_tokens`, of those, lie on disk; `device_tokens` and `host_tokens` are
    cached there. `deferred`: more of its tokens are transient than the system's `deferral_tokens`, and the time to wait
    for them is not over; if it goes all the same, it computes them itself.
    """

    id: int
    arrived_s: float
    waited_s: float
    compute_tokens: int
    device_tokens: int
    host_tokens: int
    disk_tokens: int
    transient_tokens: int
    deferred: bool


class QueueOrder(Protocol):
    """What a simulation asks whenever a batch is formed."""

    def order(self, waiting: Sequence[WaitingRequest], now: float) -> Iterable[int]:
        """The ids to try, first to last. Who is left out waits; the first for whom there is no room ends the batch.

        `waiting` comes in the queue's order, which is that of arrival. Whoever has waited for longer than the system's
        `max_wait_s` goes first in any case and is not asked about. For equal reports the answer must depend on the
        arguments and on what was asked before only.

        Whatever it raises ends the simulation as the cause of a StrataError; so do an id that was not given or comes
        twice, and naming nobody while nothing runs and somebody waits who is not deferred.
        """
        ...
