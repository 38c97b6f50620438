"""Time to first token of one prompt computed from nothing, then found on the device, the host, and the
disk.

Each round takes a new text through all states, beside the yardstick that its state is judged by, so that
whatever else the machine does falls on both. Every answer is checked: its tokens must have come from the
tier that was meant, and be the same tokens whatever the tier.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from strata.bench.bandwidth import CopyBaseline, raw_read_gbps
from strata.bench.corpus import Prompt
from strata.bench.reference import BarePool, Reference
from strata.bench.report import Bound, Steps, median
from strata.bench.target import Answer, Target
from strata.config import CacheOptions, format_size
from strata.errors import ConfigError, StorageError

COLD_BOUND = 1.08
DEVICE_BOUND = 1.5
TRANSFER_BOUND = 1.25
_WARM_UP_TOKENS = 256


class DiskReader(Protocol):
    """Reads a prompt's pages from disk and no further: (bytes, seconds)."""

    def __call__(self, token_ids: Sequence[int], pages: int) -> tuple[int, float]: ...


@dataclass(frozen=True)
class Shape:
    """What is measured: sizes of prompts and pages, and which tiers there are below the device."""

    tokens: int
    max_tokens: int
    page_size: int
    page_bytes: int
    host: bool
    disk: bool
    copy_threads: int
    disk_threads: int

    @property
    def cached_pages(self) -> int:
        """Pages that a second asking finds: at least one token is always computed."""
        return (self.tokens - 1) // self.page_size

    @property
    def kv_bytes(self) -> int:
        """Bytes of those pages."""
        return self.cached_pages * self.page_bytes

    def check_fits(self, cache: CacheOptions) -> None:
        """Raises ConfigError if a prompt and its answer do not fit every tier that is on."""
        pages = -(-(self.tokens + self.max_tokens) // self.page_size) + 1
        needed = pages * self.page_bytes
        sizes = {"device_memory": cache.device_memory}
        sizes |= {"host_memory": cache.host_memory} if self.host else {}
        sizes |= {"disk_capacity": cache.disk_capacity} if self.disk else {}
        for name, size in sizes.items():
            # Records and segments have headers: the disk needs somewhat more than the pages.
            if size < needed * (1.25 if name == "disk_capacity" else 1):
                raise ConfigError(
                    f"--{name.replace('_', '-')} {format_size(size)} is too small: a prompt of --tokens "
                    f"{self.tokens} and --max-tokens {self.max_tokens} take {format_size(needed)}; give twice "
                    "that"
                )


@dataclass
class Round:
    """One text's measurements in seconds and GB/s; None where a tier is off or a yardstick is missing."""

    title: str
    reference_prefill_s: float = 0.0
    cold_ttft_s: float = 0.0
    device_ttft_s: float = 0.0
    bare_forward_s: float | None = None
    follow_up_ttft_s: list[float] = field(default_factory=list)
    host_ttft_s: float | None = None
    disk_ttft_s: float | None = None
    disk_read_s: float | None = None
    copy_streaming_gbps: float | None = None
    copy_threaded_gbps: float | None = None
    raw_disk_gbps: float | None = None
    computed_tokens: int = 0
    tokens_equal: bool = True
    reference_token_equal: bool = True


class LongDoc:
    """Takes prompts through the tiers of a target."""

    def __init__(
        self,
        target: Target,
        reference: Reference,
        shape: Shape,
        bare: BarePool | None = None,
        read_from_disk: DiskReader | None = None,
    ) -> None:
        self._target = target
        self._reference = reference
        self._shape = shape
        self._bare = bare
        self._read_from_disk = read_from_disk
        self._copies = CopyBaseline(shape.kv_bytes, shape.copy_threads) if shape.host else None

    def warm_up(self, prompt: Prompt) -> None:
        """Lets both sides allocate and choose their kernels before anything is timed."""
        few = prompt.token_ids[: min(_WARM_UP_TOKENS, self._shape.tokens)]
        self._reference.prefill(few)
        self._target.ask(few, 2)
        self._target.settle()

    def steps_per_round(self) -> int:
        """How often `run` calls `steps.next`."""
        return 3 + self._shape.host + 2 * self._shape.disk

    def run(self, index: int, prompt: Prompt, steps: Steps, disk_root: Path) -> Round:
        """One round. `index` decides which of two things that are compared goes first. Raises
        StorageError if an answer came from elsewhere than meant.
        """
        this = Round(prompt.title)
        self._target.flush()
        cold = self._cold(index, prompt, this, steps)
        answers = [cold, self._device(index, prompt, this, steps)]
        if self._shape.host:
            answers.append(self._host(prompt, this, steps))
        if self._shape.disk:
            answers.append(self._disk(index, prompt, this, steps, disk_root))
        this.tokens_equal = all(answer.tokens == cold.tokens for answer in answers)
        return this

    def _cold(self, index: int, prompt: Prompt, this: Round, steps: Steps) -> Answer:
        answers: list[Answer] = []
        reference_tokens: list[int] = []

        def refer() -> None:
            steps.next("reference: prefill")
            this.reference_prefill_s, token = self._reference.prefill(prompt.token_ids)
            reference_tokens.append(token)

        def ask() -> None:
            steps.next("cold")
            answers.append(self._ask(prompt.token_ids, "computed"))
            this.cold_ttft_s = answers[0].ttft_s

        _in_turn(index, refer, ask)
        first = answers[0].tokens[0]
        this.reference_token_equal = not isinstance(first, int) or first == reference_tokens[0]
        self._target.settle()
        return answers[0]

    def _device(self, index: int, prompt: Prompt, this: Round, steps: Steps) -> Answer:
        steps.next("device hit")
        answers: list[Answer] = []
        computed = self._shape.tokens - self._shape.cached_pages * self._shape.page_size
        this.computed_tokens = computed

        def ask() -> None:
            answers.append(self._ask(prompt.token_ids, "device"))
            this.device_ttft_s = answers[0].ttft_s

        def refer() -> None:
            if self._bare is not None:
                this.bare_forward_s = self._bare.seconds(prompt.token_ids, computed)

        _in_turn(index, refer, ask)
        for other in prompt.follow_ups:
            this.follow_up_ttft_s.append(self._target.ask(other, self._shape.max_tokens).ttft_s)
        self._target.settle()
        return answers[0]

    def _host(self, prompt: Prompt, this: Round, steps: Steps) -> Answer:
        steps.next("host hit")
        self._target.demote(["device"])
        if self._copies is not None:
            this.copy_streaming_gbps = self._copies.streaming()
            this.copy_threaded_gbps = self._copies.threaded()
        answer = self._ask(prompt.token_ids, "host")
        this.host_ttft_s = answer.ttft_s
        self._target.settle()
        return answer

    def _disk(self, index: int, prompt: Prompt, this: Round, steps: Steps, disk_root: Path) -> Answer:
        answers: list[Answer] = []

        def ask() -> None:
            steps.next("disk hit after a restart")
            self._target.restart()
            answers.append(self._ask(prompt.token_ids, "disk"))
            this.disk_ttft_s = answers[0].ttft_s
            self._target.settle()

        def refer() -> None:
            steps.next("disk read alone, after a restart")
            if self._read_from_disk is not None:
                self._target.restart()
                _, this.disk_read_s = self._read_from_disk(prompt.token_ids, self._shape.cached_pages)
            this.raw_disk_gbps = raw_read_gbps(disk_root, self._shape.disk_threads, self._shape.kv_bytes)

        _in_turn(index, refer, ask)
        return answers[0]

    def _ask(self, token_ids: Sequence[int], source: str) -> Answer:
        """An answer whose prompt came from `source`, all that can: the rest is computed."""
        answer = self._target.ask(token_ids, self._shape.max_tokens)
        cached = 0 if source == "computed" else self._shape.cached_pages * self._shape.page_size
        found = answer.sources
        meant = self._shape.tokens if source == "computed" else cached
        if getattr(found, source) != meant or found.cached != cached:
            raise StorageError(
                f"{meant} of {self._shape.tokens} prompt tokens were to be {source}, but they were: device "
                f"{found.device}, host {found.host}, disk {found.disk}, computed {found.computed}; the "
                "engine's log says why; --host-memory and --disk-capacity govern it, and --load-policy always with "
                "--prefetch-policy wait where computing is quicker than loading"
            )
        return answer


def _in_turn(index: int, one: Callable[[], None], other: Callable[[], None]) -> None:
    """Both, in an order that alternates from round to round."""
    for work in (one, other) if index % 2 == 0 else (other, one):
        work()


def summarise(rounds: Sequence[Round], shape: Shape) -> dict[str, Any]:
    """Medians over the rounds, by the names of the result's fields. Seconds and GB/s (1e9 bytes)."""

    def middle(values: Sequence[float | None]) -> float | None:
        there = [value for value in values if value is not None]
        return median(there) if there else None

    streaming = middle([this.copy_streaming_gbps for this in rounds])
    threaded = middle([this.copy_threaded_gbps for this in rounds])
    read_s = middle([this.disk_read_s for this in rounds])
    return {
        "tokens": shape.tokens,
        "reference_prefill_s": middle([this.reference_prefill_s for this in rounds]),
        "cold_ttft_s": middle([this.cold_ttft_s for this in rounds]),
        "device_ttft_s": middle([this.device_ttft_s for this in rounds]),
        "host_ttft_s": middle([this.host_ttft_s for this in rounds]),
        "disk_ttft_s": middle([this.disk_ttft_s for this in rounds]),
        "kv_bytes": shape.kv_bytes,
        # The faster yardstick is the stricter one.
        "copy_gbps": max((rate for rate in (streaming, threaded) if rate is not None), default=None),
        "disk_gbps": shape.kv_bytes / read_s / 1e9 if read_s else None,
        "disk_read_s": read_s,
        "bare_forward_s": middle([this.bare_forward_s for this in rounds]),
        "follow_up_ttft_s": middle([value for this in rounds for value in this.follow_up_ttft_s]),
        "computed_tokens": rounds[0].computed_tokens,
        "copy_streaming_gbps": streaming,
        "copy_threaded_gbps": threaded,
        "raw_disk_gbps": middle([this.raw_disk_gbps for this in rounds]),
        "tokens_equal": all(this.tokens_equal for this in rounds),
        "reference_token_equal": all(this.reference_token_equal for this in rounds),
    }


def bounds_of(summary: dict[str, Any]) -> list[Bound]:
    """What the medians promise, of what was measured."""
    device, kv_bytes = summary["device_ttft_s"], summary["kv_bytes"]
    copy_s = _seconds(kv_bytes, summary["copy_gbps"])
    disk_s = _seconds(kv_bytes, summary["disk_gbps"])
    bounds = [
        Bound(
            "cold",
            summary["cold_ttft_s"] / summary["reference_prefill_s"],
            COLD_BOUND,
            "x",
            "cold TTFT / reference prefill",
        )
    ]
    if summary["bare_forward_s"]:
        rule = "device hit / bare forward of the uncomputed tokens"
        bounds.append(Bound("device hit", device / summary["bare_forward_s"], DEVICE_BOUND, "x", rule))
    if summary["host_ttft_s"] and copy_s:
        most = device + TRANSFER_BOUND * copy_s
        rule = f"device hit + {TRANSFER_BOUND} x kv_bytes / copy_gbps"
        bounds.append(Bound("host hit", summary["host_ttft_s"], most, "s", rule))
    if summary["disk_ttft_s"] and disk_s and copy_s:
        most = device + TRANSFER_BOUND * disk_s + copy_s
        rule = f"device hit + {TRANSFER_BOUND} x kv_bytes / disk_gbps + kv_bytes / copy_gbps"
        bounds.append(Bound("disk hit", summary["disk_ttft_s"], most, "s", rule))
    return bounds


def _seconds(size: int, gbps: float | None) -> float | None:
    return size / gbps / 1e9 if gbps else None
