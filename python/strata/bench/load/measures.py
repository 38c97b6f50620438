"""A run's records as figures, and those of several seeds as medians with least and most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from strata.bench.load.runner import Record, Run
from strata.bench.report import median

PERCENTILES = (50, 90, 99)
Figures = dict[str, float]


def figures_of(run: Run) -> Figures:
    """A run's figures by name; those of requests that failed are left out of all but the counts. A figure of nothing,
    such as the gaps of answers of one token, is missing.

    `ttft_s` counts from the moment at which a request was due, `ttft_sent_s` from its sending. `token_gap_s` is between
    two pieces of text of one answer. `late_s` is how late the client itself was, where no limit made it wait.
    """
    whole = [record for record in run.records if record.reply.error is None]
    output_tokens = sum(record.reply.output_tokens for record in whole)
    figures: Figures = {
        "requests": len(run.records),
        "failed": len(run.records) - len(whole),
        "unsent": run.unsent,
        "limited": sum(record.limited for record in run.records),
        "most_in_flight": run.most_in_flight,
        "seconds": run.seconds,
        "requests_per_s": _rate(len(whole), run.seconds),
        "output_tokens_per_s": _rate(output_tokens, run.seconds),
        "output_tokens": output_tokens,
        "prompt_tokens": sum(record.reply.prompt_tokens or 0 for record in whole),
    }
    first = [(record, record.reply.first_s) for record in whole]
    sent = [
        (record.sent_s, first_s - record.reply.sent_s) for record, first_s in first if first_s is not None
    ]
    due = [
        record.sent_s - record.due_s + first_s - record.reply.sent_s
        for record, first_s in first
        if first_s is not None
    ]
    figures |= _spread("ttft_s", due) | _spread("ttft_sent_s", [seconds for _, seconds in sent])
    figures |= _spread("token_gap_s", [gap for record in whole for gap in record.reply.token_gaps_s])
    late = [record.sent_s - record.due_s for record in run.records if not record.limited]
    figures |= {"late_s_max": max(late)} if late else {}
    return figures | {f"tokens_{name}": count for name, count in _sources(whole).items()}


def _spread(name: str, values: Sequence[float]) -> Figures:
    if not values:
        return {}
    found = {f"{name}_mean": float(np.mean(values)), f"{name}_max": max(values)}
    return found | {f"{name}_p{rank}": float(np.percentile(values, rank)) for rank in PERCENTILES}


def _sources(records: Sequence[Record]) -> Counter[str]:
    found: Counter[str] = Counter()
    for record in records:
        found.update(record.reply.sources)
    return found


def _rate(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


def across_seeds(runs: Sequence[Figures]) -> dict[str, dict[str, float]]:
    """Median, least and most of each figure that every run has."""
    kinds: dict[str, Callable[[Sequence[float]], float]] = {"median": median, "least": min, "most": max}
    names = [name for name in runs[0] if all(name in run for run in runs)]
    return {name: {kind: of([run[name] for run in runs]) for kind, of in kinds.items()} for name in names}


def failures_of(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The messages of what failed, the commonest first, and how often each came."""
    messages = Counter(record.reply.error for run in runs for record in run.records if record.reply.error)
    return [{"message": message, "count": count} for message, count in messages.most_common()]


def record_as_json(record: Record) -> Mapping[str, Any]:
    """One request for the JSON result; seconds from the start of the run."""
    reply = record.reply
    ttft_sent_s = None if reply.first_s is None else reply.first_s - reply.sent_s
    return {
        "topic": record.topic,
        "turn": record.turn,
        "due_s": record.due_s,
        "sent_s": record.sent_s,
        "limited": record.limited,
        "ttft_s": None if ttft_sent_s is None else record.sent_s - record.due_s + ttft_sent_s,
        "ttft_sent_s": ttft_sent_s,
        "seconds": reply.end_s - reply.sent_s,
        "token_gap_s_max": max(reply.token_gaps_s, default=None),
        "prompt_tokens": reply.prompt_tokens,
        "output_tokens": reply.output_tokens,
        "sources": reply.sources,
        "error": reply.error,
    }
