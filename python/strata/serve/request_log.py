"""One line for each request: where its prompt came from, how long the first token took, what that saved."""

from __future__ import annotations

import logging

from strata.engine.api import TIERS, Usage
from strata.serve.logs import fields
from strata.serve.request_id import current_request_id

_log = logging.getLogger("strata.serve")


def request_line(usage: Usage) -> str:
    """E.g. `4,012 in: 3,984 disk, 28 computed | TTFT 0.6 s, saved ~15 s | 64 out`."""
    sources = [(tier, getattr(usage.sources, tier)) for tier in (*TIERS, "computed")]
    parts = ", ".join(f"{tokens:,} {name}" for name, tokens in sources if tokens) or "nothing"
    saved = f", saved ~{_seconds(usage.saved_s)}" if usage.sources.cached and usage.saved_s > 0 else ""
    preempted = f" | preempted {usage.preemptions} times" if usage.preemptions else ""
    return (
        f"{usage.prompt_tokens:,} in: {parts} | TTFT {_seconds(usage.ttft_s)}{saved}"
        f" | {usage.completion_tokens:,} out{preempted}"
    )


def request_fields(usage: Usage) -> dict[str, float]:
    """The same as fields of a JSON line: tokens by where they came from, and seconds."""
    sources = {f"{source}_tokens": getattr(usage.sources, source) for source in (*TIERS, "computed")}
    times = ("ttft_s", "saved_s", "queue_s", "prefill_s", "decode_s")
    return {
        "prompt_tokens": usage.prompt_tokens,
        **sources,
        "completion_tokens": usage.completion_tokens,
        "preemptions": usage.preemptions,
        **{name: round(getattr(usage, name), 6) for name in times},
    }


def log_finished(usage: Usage) -> None:
    """Says that a request was answered."""
    line, request = request_line(usage), current_request_id()
    _log.info("%s | id %s", line, request, extra=fields(**request_fields(usage)))


def log_cut(pieces: int) -> None:
    """Says that an answer was not sent to its end."""
    _log.info(
        "cut after %d pieces: the client left, or the server is stopping; aborted | id %s",
        pieces,
        current_request_id(),
        extra=fields(pieces=pieces),
    )


def _seconds(value: float) -> str:
    """Two digits that matter: `15 s`, `0.6 s`, `28 ms`."""
    if value >= 9.95:
        return f"{value:,.0f} s"
    return f"{value:.1f} s" if value >= 0.0995 else f"{value * 1000:.0f} ms"
