"""An engine without a model: it answers with a script, and records what the server asked of it.

A token is a character's code point, so that any text can be checked. `FakeEngine.control` steers each answer.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from strata.config import StrataConfig
from strata.engine.api import (
    TIERS,
    Chunk,
    FinishReason,
    GenerationRequest,
    Health,
    Progress,
    TierReport,
    TokenLogprob,
    TokenSources,
    Usage,
    WaitingReport,
)
from strata.engine.context import ContextBounds
from strata.errors import CapacityError, ConfigError, RequestError, StorageError, StrataError

GIB = 1 << 30


class FakeTokenizer:
    """One token a character; a chat is its messages' texts between markers."""

    highest_token_id = 0x10FFFF

    def __init__(self) -> None:
        self.threads: set[str] = set()
        self.template_writes_date = False
        self.encoded = 0
        """Characters of all texts that were tokenised."""
        self.template_takes_tools = True
        self.template_marks_tool_calls = True

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.threads.add(threading.current_thread().name)
        self.encoded += len(text)
        return [ord(character) for character in text]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        # As real ones do, it passes over ids that are no token.
        return "".join(chr(token) for token in token_ids if token <= 0x10FFFF)

    def info(self) -> dict[str, str | None]:
        return {"eos_token": "\0", "chat_template": None}

    def token_text(self, token_id: int) -> str:
        return chr(token_id)

    def token_bytes(self, token_id: int, begins: bool = False) -> bytes:
        return chr(token_id).encode()

    def is_empty(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> bool:
        return not token_ids

    def is_shown(self, token_id: int, skip_special_tokens: bool) -> bool:
        return True

    def token_offsets(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(range(len(text)))

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Any] = (),
        **variables: Any,
    ) -> str:
        said = "".join(
            f"<{message['role']}>{message.get('reasoning_content', '')}{message['content']}"
            + "".join(f"<call>{call['function']['arguments']}" for call in message.get("tool_calls", ()))
            for message in messages
        )
        named = "".join(f"<tool>{tool['function']['name']}" for tool in tools)
        return named + "".join(variables) + said + ("<assistant>" if add_generation_prompt else "")


@dataclass
class Control:
    """What the next answers do."""

    pieces: tuple[str, ...] = ("Hello", ", ", "world")
    delay_s: float = 0.0
    finish_reason: FinishReason = "stop"
    stopped_by: str | int | None = None
    fail_after: int | None = None
    """Pieces after which the stream raises StorageError."""
    hold: bool = False
    """Whether answers wait, after their pieces, until they are aborted."""
    full: bool = False
    dead: bool = False
    sources: TokenSources | None = None
    progress: Progress | None = None
    """What a stream says of its prompt; None: that it waits."""


@dataclass(eq=False)
class FakeStream:
    """Plays `control` back, by thread or by event loop."""

    request_id: int
    request: GenerationRequest
    control: Control
    started: float = field(default_factory=time.monotonic)
    aborted: threading.Event = field(default_factory=threading.Event)
    abort_time: float = 0.0
    ended: bool = False

    @property
    def prompt(self) -> npt.NDArray[np.uint32]:
        return np.asarray(self.request.prompt_token_ids, np.uint32)

    def progress(self) -> Progress:
        return self.control.progress or Progress(len(self.request.prompt_token_ids), 0, None)

    def __iter__(self) -> Iterator[Chunk]:
        for wait_s, chunk in self._script():
            if chunk is None:
                self.aborted.wait(wait_s)
            else:
                yield chunk

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        for wait_s, chunk in self._script():
            if chunk is None:
                await asyncio.sleep(wait_s)
            else:
                yield chunk

    def abort(self) -> None:
        if not self.ended and not self.aborted.is_set():
            self.abort_time = time.monotonic()
            self.aborted.set()

    def _chunk(self, number: int, piece: str) -> Chunk:
        """Every token has log probability -1, and -2, -3, ... follow as the likeliest others."""
        sampling, prompt = self.request.sampling, self.request.prompt_token_ids

        def scored(token: int, count: int) -> TokenLogprob:
            others = tuple((ord("a") + place, -2.0 - place) for place in range(count))
            return TokenLogprob(token, -1.0, others)

        tokens = tuple(map(ord, piece))
        logprobs: tuple[TokenLogprob, ...] = ()
        prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
        if sampling.logprobs is not None:
            logprobs = tuple(scored(token, sampling.logprobs) for token in tokens)
        if sampling.prompt_logprobs is not None and number == 0:
            prompt_logprobs = (None, *(scored(token, sampling.prompt_logprobs) for token in prompt[1:]))
        return Chunk(piece, tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs)

    def _script(self) -> Iterator[tuple[float, Chunk | None]]:
        control = self.control
        for number, piece in enumerate(control.pieces):
            if number == control.fail_after:
                raise StorageError("the fake disk is gone; give it another --disk-path")
            yield control.delay_s, None
            if self.aborted.is_set():
                break
            yield 0.0, self._chunk(number, piece)
        while control.hold and not self.aborted.is_set():
            yield 0.01, None
        reason: FinishReason = "abort" if self.aborted.is_set() else control.finish_reason
        self.ended = True
        prompt = len(self.request.prompt_token_ids)
        sources = control.sources or TokenSources(computed=prompt)
        tokens = sum(len(piece) for piece in control.pieces)
        times = {"queue_s": 0.05, "prefill_s": 0.2, "decode_s": 0.5}
        yield (
            0.0,
            Chunk(
                "",
                (),
                reason,
                Usage(prompt, tokens, sources, 0.25, 1.5, **times),
                stopped_by=control.stopped_by,
            ),
        )


class FakeEngine:
    """Implements `strata.engine.api.EngineProtocol`."""

    def __init__(self, config: StrataConfig) -> None:
        self.config = config
        self.reset()

    def reset(self) -> None:
        """Forgets everything that was asked and ordered."""
        self.model_name = "fake-model"
        self.context = ContextBounds(model=4096, device=1 << 20, whole_bytes=GIB)
        self.tokenizer = FakeTokenizer()
        self.sampling_defaults: dict[str, float] = {}
        self.control = Control()
        self.streams: list[FakeStream] = []
        self.submit_threads: set[str] = set()
        self.calls: list[tuple[Any, ...]] = []
        self.flush_started = threading.Event()
        self.flush_may_end = threading.Event()
        self.flush_may_end.set()

    @property
    def max_context(self) -> int:
        return self.context.tokens

    def submit(self, request: GenerationRequest) -> FakeStream:
        self.submit_threads.add(threading.current_thread().name)
        if self.control.full:
            raise CapacityError("1,024 requests wait already; send it again later or raise --max-waiting")
        if max(request.prompt_token_ids) > 0x10FFFF:
            raise RequestError(
                "token 1114112 is not in the vocabulary of 1114111; send ids below that", "prompt"
            )
        stream = FakeStream(len(self.streams), request, self.control)
        self.streams.append(stream)
        return stream

    def health(self) -> Health:
        if self.control.dead:
            return Health(False, False, ("the engine thread ended",))
        return Health(True, True)

    def tiers(self) -> list[TierReport]:
        return [
            TierReport("device", True, 4 * GIB, GIB, 0, 1000, "memory"),
            TierReport("host", False, 0, 0, 0, 0, "", "--host-memory is 0"),
            TierReport("disk", True, 10 * GIB, GIB // 2, 4096, 12000, "2 threads"),
        ]

    def waiting(self) -> list[WaitingReport]:
        return [
            WaitingReport(
                7,
                1.5,
                "deferred: request 6 computes 290 of its tokens; it goes on its own in 90 ms",
                "deferred",
            )
        ]

    def stats(self) -> dict[str, float]:
        if self.control.dead:
            raise StrataError("the engine has stopped")
        return {
            "deferrals": 2,
            "deferred_ns": 1_500_000_000,
            "set_aside_rounds": 4,
            "prompt_tokens_device": 100,
            "prompt_tokens_disk": 3984,
            "prompt_tokens_computed": 28,
            "prefilled_tokens": 28,
            "load_bytes": 1000,
            "spill_bytes": 500,
            "prefetch_bytes": 300,
            "hit_age_le_1": 3,
            "hit_age_le_10": 5,
            "hit_age_count": 6,
            "hit_age_sum_s": 700,
            "token_gap_le_0.01": 4,
            "token_gap_le_2.5": 9,
            "token_gap_count": 10,
            "token_gap_sum_s": 12.5,
            "step_tokens_le_1": 7,
            "step_tokens_count": 8,
            "step_tokens_sum": 520,
            "device_capacity_pages": 100,
            "device_used_pages": 40,
            "device_resident_pages": 30,
            "aborted": 6,
            "generated_tokens": 11,
            "device_pinned_pages": 3,
            "running": 2,
            "waiting": 1,
            "preemptions": 7,
            "cost_load_bytes_per_s": 2.5e9,
            "cost_load_measurements": 12,
            "cost_load_error_median": 0.07,
            "cost_load_error_p90": 0.31,
            "cost_decode_error_p90": 0.2,
        }

    def check(self) -> None:
        self.calls.append(("check",))

    def flush(self, timeout_s: float = 60.0) -> dict[str, int]:
        self.flush_started.set()
        self.flush_may_end.wait(timeout_s)
        self.calls.append(("flush",))
        return {
            "device_dropped": 3,
            "device_kept": 0,
            "host_dropped": 0,
            "host_kept": 2,
            "disk_dropped": 5,
            "not_erased": 0,
        }

    def demote(self, tiers: Sequence[str], timeout_s: float = 60.0) -> dict[str, int]:
        self.calls.append(("demote", *tiers))
        return {"device_moved": 250}

    def resize(self, tier: str, size_bytes: int, timeout_s: float = 60.0) -> dict[str, int]:
        if tier not in TIERS:
            raise RequestError(f"there is no tier {tier!r}: name device, host or disk")
        if size_bytes > 1 << 50:
            raise CapacityError(f"{size_bytes} bytes for the {tier} tier: that does not fit; give less")
        self.calls.append(("resize", tier, size_bytes))
        return {"bytes": size_bytes, "timed_out": 0}

    def attach_disk(self, path: Path | None = None, capacity: int | None = None) -> None:
        if path == Path("attached"):
            raise ConfigError("a disk root is attached already; detach it first")
        self.calls.append(("attach_disk", path, capacity))

    def detach_disk(self, timeout_s: float = 60.0) -> bool:
        self.calls.append(("detach_disk",))
        return True

    def shutdown(self, drain_s: float, demote_s: float) -> dict[str, int]:
        self.calls.append(("shutdown", drain_s, demote_s))
        for stream in self.streams:
            stream.abort()
        return {"device_moved": 250, "device_dropped": 250, "disk_resident_pages": 250}


class UnloadableEngine(FakeEngine):
    """Fails where the real engine would read the model."""

    def __init__(self, config: StrataConfig) -> None:
        raise StrataError(f"--model {config.model.model} does not exist; give a folder")
