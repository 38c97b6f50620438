"""Recorded traffic in Mooncake's form: times, lengths, and the numbers of the prompt's blocks of 512 tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from strata.errors import ConfigError
from strata.simulate.convert.entry import law_of
from strata.simulate.convert.options import Conversion, Converted
from strata.simulate.convert.records import Record, read_records

BLOCK_TOKENS = 512
MOONCAKE_FORM = (
    "in Mooncake's form: `timestamp` (ms), `input_length`, `output_length` and `hash_ids`, one for each "
    f"{BLOCK_TOKENS} tokens of input"
)


def mooncake(inputs: Sequence[Path], conversion: Conversion) -> Converted:
    """Traces, one after the other as they were given; their times are kept, and the earliest becomes 0. Blocks of equal
    numbers are shared, between files as well. Raises ConfigError."""
    records = list(islice(_records(inputs), conversion.most_requests))
    if not records:
        raise ConfigError(
            f"{', '.join(map(str, inputs))}: no request was found; give files with records {MOONCAKE_FORM}"
        )
    records.sort(key=lambda record: record["timestamp"])
    first = records[0]["timestamp"]
    for record in records:
        record["timestamp"] -= first
    workload = {
        "kind": "trace",
        "records": records,
        "block_tokens": BLOCK_TOKENS,
        "time_scale": conversion.time_scale,
    }
    notes = [f"arrivals are the trace's own, {conversion.time_scale:g} times as far apart (--time-scale)"]
    if first:
        notes.append(f"the trace begins at {first:g} ms, which is 0 here")
    return Converted(workload, _statistics(records, conversion.time_scale), tuple(notes))


def _records(inputs: Sequence[Path]) -> Iterator[dict[str, Any]]:
    for path in inputs:
        for record in read_records(path, MOONCAKE_FORM):
            yield _request(record)


def _request(record: Record) -> dict[str, Any]:
    lengths = {name: record.number(name, 1) for name in ("input_length", "output_length")}
    for name, value in lengths.items():
        if value != int(value):
            raise record.refuse(f"`{name}` is {value!r}, not a whole number")
    blocks = record.items("hash_ids")
    for index, block in enumerate(blocks):
        if isinstance(block, bool) or not isinstance(block, int) or not 0 <= block < 1 << 64:
            raise record.refuse(f"`hash_ids[{index}]` is {block!r}, not a whole number of 0 or more")
    needed = -(-int(lengths["input_length"]) // BLOCK_TOKENS)
    if len(blocks) < needed:
        raise record.refuse(
            f"`hash_ids` has {len(blocks)} numbers, and {lengths['input_length']} tokens have {needed} blocks"
        )
    return {
        "timestamp": record.number("timestamp", 0),
        "input_length": int(lengths["input_length"]),
        "output_length": int(lengths["output_length"]),
        "hash_ids": blocks[:needed],
    }


def _statistics(records: Sequence[dict[str, Any]], time_scale: float) -> dict[str, Any]:
    prompt = sum(record["input_length"] for record in records)
    repeated = repeated_tokens(records)
    span_s = records[-1]["timestamp"] * time_scale / 1000
    return {
        "requests": len(records),
        "span_s": round(span_s, 3),
        "requests_per_s": round(len(records) / span_s, 4) if span_s else None,
        "prompt_tokens": law_of(record["input_length"] for record in records),
        "output_tokens": law_of(record["output_length"] for record in records),
        "repeated_share": round(repeated / prompt, 4),
    }


def repeated_tokens(records: Sequence[dict[str, Any]]) -> int:
    """Prompt tokens in blocks that an earlier prompt began with, as far as it did."""
    seen: set[int] = set()
    repeated = 0
    for record in records:
        known = 0
        for block in record["hash_ids"]:
            if block not in seen:
                break
            known += BLOCK_TOKENS
        repeated += min(known, record["input_length"])
        seen.update(record["hash_ids"])
    return repeated
