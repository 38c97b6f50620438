"""The scheduler over the same tiers, for engines that compute what Strata decides: requests in, plans out, reports
back.

The loop of an engine: `next_work`; for a Plan, write the K/V of its tokens where `slot_mapping` says, attend over its
`page_tables`, and call `wait_layer` before a layer reads cached pages; then `done` with what was sampled, or
`failed`. Source: sections 4 and 5 of the Strata paper (delay hits, balanced batches, bundles, bubbles), and what
ARCHITECTURE.md says under "Decided".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy.typing as npt

from strata._core import Plan, Refusal
from strata.cache.ids import id_array
from strata.cache.tiers import Tiers
from strata.errors import LoadFailedError, RequestError

FAILURES = ("step", "load", "late load")
_CONFIRM_S = 30.0
"""How long a report waits for a device to say that a plan's loads are over."""


class Scheduler(Tiers):
    """Core's scheduler and cache over the caller's `pool`, as for `TieredCache`; `settings` are the fields of
    `strata.config.CacheOptions` and `SchedulerOptions`. Requests may be submitted and aborted from any thread; one
    thread, the engine's, takes work and reports it, in the order in which it came.

    Raises ConfigError (pool of another shape, settings), CapacityError (memory, threads), StorageError (disk).
    """

    _schedules = True
    _epoch = 0
    """Plans of an older one are void."""

    @cached_property
    def _out(self) -> deque[int]:
        """Plans that were handed out and not reported, the oldest first."""
        return deque()

    def submit(
        self,
        request: int,
        prompt: Sequence[int] | npt.NDArray[Any],
        max_new_tokens: int,
        salt: str = "",
        priority: int = 0,
        keep: bool = True,
    ) -> None:
        """Queues a request under a number of the caller's, from 0 to 2**63 - 1 and never used before. What it
        computes is cached unless `keep` is False. A refusal comes back as work. Raises CapacityError if too much is
        on its way."""
        if not 0 <= request < 2**63 or max_new_tokens < 0:
            raise RequestError(
                f"request {request} with {max_new_tokens} tokens to generate: the number must be from 0 to 2**63 - 1, "
                "the tokens 1 or more"
            )
        self.runtime.submit(request, id_array(prompt, "tokens"), max_new_tokens, salt, priority, keep)

    def abort(self, request: int) -> None:
        """Gives a request up; what it computed stays cached. Unknown and finished requests are ignored."""
        self.runtime.abort(request)

    def next_work(self, timeout_s: float = 0.2) -> Plan | Refusal | None:
        """The next batch to compute, or a request that will not be answered, or None within `timeout_s` seconds. Plans
        that a failed one has made void are left out. Raises StrataError once Core has stopped."""
        work = self.runtime.next_work(timeout_s)
        if isinstance(work, Plan):
            if work.epoch < self._epoch:
                return None
            self._out.append(work.id)
            self.step_begins()
        return work

    def wait_layer(self, plan: Plan, layer: int, timeout_s: float = 30.0) -> None:
        """Returns once layer `layer` of what a plan loads is on the device: an atomic read if it is there already.
        Raises LoadFailedError if it does not come (`late`: not within `timeout_s` seconds): report the plan as
        failed, with `late load` or `load`."""
        if self.carrier is None:
            outcome = plan.wait_layer(layer, timeout_s)
        else:
            outcome = self.carrier.wait_layer(plan, layer, timeout_s)
        _require_ready(plan, layer, outcome)

    def done(
        self,
        plan: Plan,
        tokens: Sequence[int | None],
        finished: Sequence[bool],
        busy_s: float = 0.0,
        stalled_s: float = 0.0,
    ) -> None:
        """Reports the oldest plan out as computed: for each row the sampled token (None where `plan.samples` asks for
        none) and whether the request ends with it. `busy_s` seconds of it went to computing, `stalled_s` to waiting for
        loads: what Core predicts by. Nothing happens for a plan that a failed one has made void. Raises RequestError
        for another number of rows and for a plan that is not the oldest; on a GPU LoadFailedError as `wait_layer`."""
        if self._is_void(plan):
            self.step_done()
            return
        rows = len(plan.requests)
        if len(tokens) != rows or len(finished) != rows:
            raise RequestError(
                f"plan {plan.id} has {rows} rows; {len(tokens)} tokens and {len(finished)} ends came: one of each a row"
            )
        for sample, token in zip(plan.samples, tokens, strict=True):
            if sample and token is None:
                raise RequestError(f"plan {plan.id} asks for a token in a row that has None: sample one")
        self.step_done()
        if self.carrier is not None and plan.loads:
            # What the plan publishes must not rest on a load that may still fail.
            last = self.pool.layers - 1
            _require_ready(plan, last, plan.wait_layer(last, _CONFIRM_S))
        self.runtime.plan_done(plan.id, list(tokens), list(finished), busy_s, stalled_s)
        self._out.popleft()

    def failed(self, plan: Plan, why: str = "step") -> None:
        """Reports the oldest plan out as failed: `step` (it went wrong itself), `load` (one of its loads failed) or
        `late load`. It and those formed on top of it are void; their requests are tried again, without the load if it
        was that. Nothing happens for a plan that is void already. Raises RequestError for another reason and for a
        plan that is not the oldest; DeviceError after Core was told, if the device cannot say what still runs."""
        if why not in FAILURES:
            raise RequestError(f"there is no failure {why!r}: say one of {', '.join(FAILURES)}")
        void = self._is_void(plan)
        try:
            self.step_done()
        finally:
            # Core waits for a report of every plan: without one nothing would ever be planned again.
            if not void:
                self.runtime.plan_failed(plan.id, why)
                self._epoch = max(self._epoch, plan.epoch + 1)
                self._out.clear()

    def _is_void(self, plan: Plan) -> bool:
        """Whether a failed plan has made this one void. Raises RequestError unless it then is the oldest out."""
        if plan.epoch < self._epoch:
            return True
        if not self._out or plan.id != self._out[0]:
            oldest = f"plan {self._out[0]} comes first" if self._out else "none is out"
            raise RequestError(
                f"plan {plan.id} is not the oldest that was handed out and not reported ({oldest}): report plans once "
                "each, in the order in which they came"
            )
        return False

    def waiting(self) -> list[tuple[int, float, str]]:
        """Why each waiting request waits: its number, the seconds since it was submitted, a sentence; in the order in
        which they would go."""
        return [(number, waited_s, why) for number, waited_s, why, _kind in self.runtime.explain()]

    def __enter__(self) -> Scheduler:
        return self


def _require_ready(plan: Plan, layer: int, outcome: str) -> None:
    if outcome != "ready":
        message = f"layer {layer} of plan {plan.id} was not loaded: {outcome}"
        raise LoadFailedError(message, late=outcome == "timeout")
