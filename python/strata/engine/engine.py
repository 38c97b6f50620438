"""The engine and its thread. It takes plans in order, computes, samples, reports and streams; what to compute, and
when, is Core's decision. After a failed step it skips the plans that Core had formed on top of it.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import threading
import time
from collections.abc import Sequence as SequenceOf
from pathlib import Path

from strata._core import LayerHold, Plan, Refusal, Runtime
from strata.cache.tiers import move_to_disk
from strata.config import StrataConfig
from strata.device.cuda_runtime import CudaRuntime
from strata.device.cupy_runtime import CupyRuntime
from strata.engine.answers import Answers
from strata.engine.api import (
    TIERS,
    GenerationRequest,
    Health,
    RequestStream,
    TierReport,
    WaitingReport,
)
from strata.engine.device_tier import CpuTier, CudaTier, DeviceTier
from strata.engine.disk_log import OFF_BY_CHOICE, DiskLog
from strata.engine.grammar import Grammars
from strata.engine.runtime_options import PoolSizes, device_memory, runtime_options
from strata.engine.sequence import Sequence
from strata.engine.served_model import ServedModel, load_served_model
from strata.engine.step import LOAD_TIMEOUT_S, STEP_TIMEOUT_S, run_step
from strata.engine.step_clock import MeasuredStep, StepClock
from strata.engine.step_log import StepLog, header_of
from strata.engine.streams import Stream
from strata.engine.text import StoppingText
from strata.engine.validation import checked_prompt
from strata.engine.warm_up import warm_up
from strata.errors import CapacityError, LoadFailedError, RequestError, StorageError, StrataError

_log = logging.getLogger("strata.engine")

_POLL_S = 0.2
_WARM_UP_S = 60.0
_JOIN_S = 5.0
"""How long a shutdown waits for the step that is running."""
_DEVICE_LOST = "the device is lost: restart the server"


def _only_row(plan: Plan) -> tuple[int, int] | None:
    """Tokens and context before them, of a plan for one request."""
    if len(plan.requests) != 1:
        return None
    tokens, context = plan.query_lengths[0], plan.context_lengths[0]
    return tokens, context - tokens


class _TokenTextless:
    """Stands in for a tokenizer where a library user handles token ids alone."""

    def push(self, token_id: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


class Engine:
    """Serves one model over the tiers of one configuration. Implements `EngineProtocol`.

    Loads the model unless one is given, opens the tiers and starts the thread. `hold` stops transfers in tests; `cuda`
    stands in for the GPU of `--device cuda`. Raises ModelError, ConfigError, CapacityError or StorageError, each with
    the flag to change.
    """

    def __init__(
        self,
        config: StrataConfig,
        served: ServedModel | None = None,
        hold: LayerHold | None = None,
        cuda: CudaRuntime | None = None,
    ) -> None:
        # Before a model is loaded: a device that is not there should not take a minute to say so.
        device = cuda or CupyRuntime() if config.model.device == "cuda" else None
        self._step_log = StepLog(config.server.step_log)
        self._served = served or load_served_model(config.model)
        self.config = config
        model = self._served.model
        self._sizes = PoolSizes.of(model, config.cache, device_memory(config, device), grows=device is None)
        page_size = config.cache.page_size
        self.context = self._sizes.context(model.config.context_length, page_size, config.model.max_model_len)
        options = runtime_options(self._served, config, self._sizes)
        self._tier: DeviceTier = (
            CpuTier(model, self._sizes.device_pages, page_size)
            if device is None
            else CudaTier(device, model, options, page_size)
        )
        self._clock = StepClock(self._tier.runs_behind)
        self._pool = pool = self._tier.pool
        try:
            self._runtime = Runtime(
                options, pool.address, pool.size_bytes, pool.tensor, hold, self._tier.mover, self._tier.arena
            )
        except BaseException:
            self._tier.close()
            raise
        self.model_name = config.model.names(self._served.name)[0]
        self.tokenizer = self._served.tokenizer
        self.sampling_defaults = self._served.sampling_defaults
        self._disk_path = config.cache.disk_path
        self._disk_log = DiskLog(self._runtime)
        self._answers = Answers(config.scheduler.max_running, config.scheduler.max_waiting)
        self._grammars = Grammars(self.tokenizer, model.config.vocab_size)
        self._numbers = itertools.count(1)
        self._epoch = 0
        self._forwards = {"prefill": 0, "decode": 0}
        self._prefilled_tokens = 0
        self._failure: str | None = None
        self._stopping = threading.Event()
        self._warm = threading.Event()
        self._shutdown_report: dict[str, int] = {}
        self._shut_down = threading.Event()
        self._thread = threading.Thread(target=self._run, name="strata-engine", daemon=True)
        self._thread.start()
        # Bounded: a machine that slow serves anyway, only its first answer is late.
        self._warm.wait(_WARM_UP_S)
        if not self._is_alive():
            self._runtime.close()
            self._tier.close()
            self._step_log.close()
            raise StrataError(f"the model's first step failed: {self._failure}")
        self._step_log.start(header_of(self._served, self._sizes, config), self._runtime.stats)

    # --- requests, from any thread ---------------------------------------------------------------------------

    @property
    def max_context(self) -> int:
        """Tokens that a prompt and its answer may have together."""
        return self.context.tokens

    def submit(self, request: GenerationRequest) -> RequestStream:
        """Queues a request. Raises RequestError (can never fit, bad tokens) or CapacityError (queue full)."""
        vocabulary = self._served.model.config.vocab_size
        prompt = checked_prompt(request, vocabulary, self.context)
        self._check_alive()
        sampling = request.sampling
        eos: frozenset[int] = self.tokenizer.eos_token_ids if self.tokenizer else frozenset()
        ends = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else eos)
        stops = frozenset(token for token in ends if 0 <= token < vocabulary)
        skipping = sampling.skip_special_tokens
        before = request.prompt_token_ids if request.continues_text else ()
        detokenizer = self.tokenizer.detokenizer(skipping, before) if self.tokenizer else _TokenTextless()
        number = next(self._numbers)
        stream = Stream(number, prompt, self._abort, self._is_alive)
        seed = sampling.seed if sampling.seed is not None else secrets.randbits(63)
        text = StoppingText(detokenizer, sampling.stop, sampling.include_stop)
        grammar = self._grammars.start(sampling.grammar) if sampling.grammar else None
        self._answers.add(number, Sequence(request, stream, text, seed & (2**64 - 1), stops, grammar))
        salt, keep = request.cache_salt, request.cache_write
        if sampling.prompt_logprobs is not None:
            # Every position has to be computed: in a namespace of its own nothing is found, and nothing is left there.
            salt, keep = f"prompt logprobs {secrets.token_hex(16)}", False
        try:
            self._runtime.submit(number, prompt, sampling.max_tokens, salt, request.priority, keep)
        except BaseException:
            self._answers.remove(number)
            raise
        return stream

    def _abort(self, number: int) -> None:
        sequence = self._answers.remove(number)
        if sequence is None:
            return
        sequence.end("", (), "abort", sequence.usage(self._answers.prefill_rate))
        if self._is_alive():
            self._runtime.abort(number)

    # --- the engine's thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._tier.bind_thread()
            # A restart finds a warm disk: what a hit saves is to be known before any prompt was computed.
            for step in warm_up(
                self._served.model, self._runtime, self._pool.tensor, self.config.cache.page_size
            ):
                self._answers.measure(step.tokens, step.seconds)
            self._warm.set()
            while not self._stopping.is_set():
                if self._tier.lost:
                    self._failure = _DEVICE_LOST
                    _log.error("the engine has stopped: %s (%s)", _DEVICE_LOST, self._tier.problem)
                    break
                self._disk_log.look()
                work = self._runtime.next_work(_POLL_S)
                if isinstance(work, Plan):
                    self._carry_out(work)
                elif isinstance(work, Refusal):
                    self._refuse(work)
        except Exception as error:  # noqa: BLE001 - the last line of defence: clients are told, `/health` says so
            if not self._stopping.is_set():
                self._failure = f"{type(error).__name__}: {error}"
                _log.exception("the engine has stopped")
        finally:
            self._warm.set()
            self._answers.end_all(self._failure or "the engine was shut down")

    def _carry_out(self, plan: Plan) -> None:
        if plan.epoch < self._epoch:
            return
        started, was_loading = time.monotonic(), plan.loading
        self._answers.note_begun(plan, started)
        before: MeasuredStep | None = None
        try:
            model, answers = self._served.model, self._answers
            scored = answers.scored_rows(plan)
            step = run_step(model, self._tier, plan, answers.last_tokens, scored)
            sampled = answers.sample(plan, step.logits)
            if scored:
                answers.score(plan, scored, step.scored, model.project_to_vocabulary)
            self._tier.confirm_loads(plan, LOAD_TIMEOUT_S)
            if not sampled:
                # No token brought the host up to the device: see how far behind that is.
                waited = self._tier.wait_step_before(STEP_TIMEOUT_S)
                before = self._clock.queued(_only_row(plan), started, was_loading, waited, time.monotonic())
        except LoadFailedError as error:
            _log.warning("%s; its requests are computed again", error)
            self._discard(plan, "late load" if error.late else "load")
            return
        except Exception:  # noqa: BLE001 - a step that fails must not end the other requests
            _log.exception("plan %d failed; its requests are tried again", plan.id)
            self._discard(plan, "step")
            return
        self._forwards["prefill" if plan.is_prefill else "decode"] += 1
        stalled = step.stalled_s
        took = time.monotonic() - started - stalled
        busy = self._clock.busy_s(took, plan.samples, was_loading)
        if plan.is_prefill:
            self._prefilled_tokens += sum(plan.query_lengths)
            answers.measure(sum(plan.query_lengths), busy)
            answers.note_progress(plan)
        if before is not None:
            answers.measure(before.tokens, before.seconds)
            self._runtime.measured(before.tokens, before.context, before.seconds)
        answers.note_admitted(plan, started)
        taken = answers.take(plan, sampled)
        self._runtime.plan_done(plan.id, taken.tokens, taken.ended, busy, stalled)
        answers.send(taken.chunks)
        self._step_log.note(plan, started, len(sampled), busy, stalled)

    def _discard(self, plan: Plan, why: str) -> None:
        self._clock.failed()
        self._epoch = plan.epoch + 1
        self._runtime.plan_failed(plan.id, why)

    def _refuse(self, refusal: Refusal) -> None:
        kinds = {"invalid": RequestError, "busy": CapacityError}
        self._answers.give_up(refusal.request, kinds.get(refusal.kind, StorageError)(refusal.reason))

    # --- looking at it, from any thread -----------------------------------------------------------------------

    def _is_alive(self) -> bool:
        return self._thread.is_alive()

    def _check_alive(self) -> None:
        if not self._is_alive():
            raise StrataError(self._why_stopped())

    def _why_stopped(self) -> str:
        lost = _DEVICE_LOST if self._tier.lost else None
        return f"the engine has stopped: {self._failure or lost or 'it was shut down'}"

    def health(self) -> Health:
        """Whether requests are answered, and what an operator should know."""
        problems = []
        alive = self._is_alive() and not self._tier.lost
        if not alive:
            problems.append(self._why_stopped())
        if self._tier.problem is not None:
            problems.append(f"pages move no more between host and device: {self._tier.problem}")
        engine, problem = self._runtime.disk_state()
        if engine is not None and problem is not None:
            problems.append(f"the disk tier is {problem}")
        elif engine is None and problem is not None and not problem.startswith(OFF_BY_CHOICE):
            problems.append(f"the disk tier is off: {problem}")
        ready = alive and self._warm.is_set() and not self._answers.draining
        return Health(alive, ready, tuple(problems))

    def waiting(self) -> list[WaitingReport]:
        """Why each waiting request waits, in the order in which they would go."""
        return [WaitingReport(*each) for each in self._runtime.explain()]

    def stats(self) -> dict[str, float]:
        """Counters and gauges by flat name."""
        flat = dict(self._runtime.stats())
        flat["prefill_forwards"] = float(self._forwards["prefill"])
        flat["decode_forwards"] = float(self._forwards["decode"])
        flat["prefilled_tokens"] = float(self._prefilled_tokens)
        flat["prefill_tokens_per_s"] = self._answers.prefill_rate or 0.0
        flat["page_bytes"] = float(self._sizes.page_bytes)
        return flat | self._answers.token_gaps.stats() | self._answers.step_tokens.stats()

    def tiers(self) -> list[TierReport]:
        """One report a tier, from the device down."""
        stats = self._runtime.stats()
        engine, disk_problem = self._runtime.disk_state()
        recovered, damaged = self._runtime.recovered
        disk_detail = f"{self._disk_path} ({engine}; {recovered:,} pages found, {damaged:,} damaged)"
        details = {
            "device": f"{self._tier.description}, {str(self._served.model.dtype).removeprefix('torch.')}",
            "host": "DRAM, pinned" if self._tier.mover else f"DRAM, {self._sizes.copy_threads} copy threads",
            "disk": disk_detail if engine else str(self._disk_path),
        }
        off = {
            "device": None,
            "host": None if self._sizes.host_pages else "--host-memory is 0",
            "disk": None if engine else disk_problem,
        }
        size = self._sizes.page_bytes
        return [
            TierReport(
                name=name,
                enabled=off[name] is None,
                capacity_bytes=int(stats[f"{name}_capacity_pages"]) * size,
                used_bytes=int(stats[f"{name}_used_pages"]) * size,
                pinned_bytes=int(stats[f"{name}_pinned_pages"]) * size,
                used_tokens=int(stats[f"{name}_resident_pages"]) * self.config.cache.page_size,
                detail=details[name],
                off_reason=off[name],
            )
            for name in TIERS
        ]

    def check(self) -> bool:
        """Proves that tree, pools and pins agree; True if the engine was idle, when nothing may be pinned. Raises
        StorageError with what does not agree."""
        return self._runtime.check()

    # --- maintenance ------------------------------------------------------------------------------------------

    def flush(self, timeout_s: float = 60.0) -> dict[str, int]:
        """Forgets every page of this model that no request uses, in all tiers. Returns pages dropped by tier. Raises
        StorageError if records on disk could not be cleared."""
        report = self._runtime.flush(self._enabled(TIERS), timeout_s)
        if report["not_erased"]:
            raise StorageError(
                f"records in {self.config.cache.disk_path} could not be cleared and may be found again after a "
                "restart: see the disk's state under /health, then flush again"
            )
        return report

    def demote(self, tiers: SequenceOf[str], timeout_s: float = 60.0) -> dict[str, int]:
        """Empties the given tiers downward. Returns pages moved and dropped by tier."""
        enabled = self._enabled(TIERS)
        for tier in tiers:
            if tier not in TIERS:
                raise RequestError(f"there is no tier {tier!r}: name device, host or disk", "tiers")
            below = TIERS[TIERS.index(tier) + 1 :]
            if tier not in enabled or not set(below) & set(enabled):
                raise RequestError(
                    f"{tier} cannot be demoted: it is off, or there is no tier below it", "tiers"
                )
        return self._runtime.demote(list(tiers), timeout_s)

    def resize(self, tier: str, size_bytes: int, timeout_s: float = 60.0) -> dict[str, int]:
        """Gives a tier another size while requests run; pages beyond it are evicted as their users let go. The device
        can grow up to what the engine was started with, and so can the host if a GPU knows its memory. Returns the
        bytes that the tier has now, and whether something still used pages beyond that after `timeout_s` seconds.
        Raises RequestError, CapacityError, StorageError."""
        if tier not in TIERS:
            raise RequestError(f"there is no tier {tier!r}: name device, host or disk", "tier")
        if size_bytes < 0:
            raise RequestError(
                f"size {size_bytes} of the {tier} tier is below 0: give bytes, or a size such as 8GiB", "size"
            )
        arena = self._tier.arena
        if tier == "host" and arena is not None and size_bytes // arena.page_stride > arena.pages:
            most = arena.pages * arena.page_stride
            raise CapacityError(
                f"{size_bytes} bytes for the host tier are more than the {most} bytes that were pinned for the GPU "
                "when the engine started, and what is pinned cannot grow: give less, or restart with a larger "
                "--host-memory"
            )
        return self._runtime.resize(tier, size_bytes, timeout_s)

    def attach_disk(self, path: Path | None = None, capacity: int | None = None) -> None:
        """Opens a disk root while requests run; what it holds comes back in the background. A root that is in use is
        tried again. Raises ConfigError if one is attached, StorageError if the root cannot be used."""
        cache = self.config.cache
        self._disk_path = path or self._disk_path
        self._runtime.attach_disk(self._disk_path, cache.disk_capacity if capacity is None else capacity)

    def detach_disk(self, timeout_s: float = 60.0) -> bool:
        """Closes the disk tier while requests run; what it holds stays there. False if something still used it after
        `timeout_s` seconds: then it is still there, and taking nothing new."""
        return self._runtime.detach_disk(timeout_s)

    def _enabled(self, names: SequenceOf[str]) -> list[str]:
        on = {report.name for report in self.tiers() if report.enabled}
        return [name for name in names if name in on]

    def shutdown(self, drain_s: float = 30.0, demote_s: float = 30.0) -> dict[str, int]:
        """Ends: finishes running requests within `drain_s` seconds, moves pages to disk within `demote_s`, syncs.
        Returns pages moved and dropped by tier, and what each tier held at the end as `disk_resident_pages`; nothing
        without a disk tier. Idempotent; the second call returns the first one's report. Raises StorageError if the disk
        did not let go in time; all else has ended then too."""
        if not self._answers.drain():
            self._shut_down.wait(drain_s + demote_s + 2 * _JOIN_S)
            return self._shutdown_report
        try:
            deadline = time.monotonic() + drain_s
            while self._answers.sequences and self._is_alive() and time.monotonic() < deadline:
                time.sleep(0.02)
            for number in list(self._answers.sequences):
                self._abort(number)
            if self._is_alive() and "disk" in self._enabled(TIERS):
                moved = move_to_disk(self._runtime, demote_s)
                found = self._runtime.stats()
                left = {f"{name}_resident_pages": int(found[f"{name}_resident_pages"]) for name in TIERS}
                self._shutdown_report = moved | left
        finally:
            self._stopping.set()
            self._thread.join(timeout=_JOIN_S)
            self._step_log.close()
            try:
                self._runtime.close()
            finally:
                self._tier.close()
                self._shut_down.set()
        return self._shutdown_report

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown(drain_s=0.0, demote_s=0.0)
