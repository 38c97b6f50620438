"""Recorded traffic in Mooncake's form: times, lengths, and which blocks of 512 tokens requests share. Texts are made
up so that equal block ids give equal text."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from strata.bench.load.schedule import Block, Draw, Session, Turn, characters_of, poisson_arrivals
from strata.errors import ConfigError

BLOCK_TOKENS = 512
_FORM = (
    "a JSON object a line with `timestamp` (ms), `input_length`, `output_length` and `hash_ids`, one for each "
    f"{BLOCK_TOKENS} tokens of input"
)


@dataclass(frozen=True)
class TraceRequest:
    """One line of a trace."""

    timestamp_ms: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class Fit:
    """How a trace is made to fit: seconds a second of the trace, tokens a token, and caps (None: no cap)."""

    time_scale: float
    length_scale: float
    most_prompt_tokens: int | None
    most_output_tokens: int | None
    characters_per_token: float


@dataclass(frozen=True)
class TraceWorkload:
    """A trace's requests by its own times, or in its order at a rate."""

    requests: tuple[TraceRequest, ...]
    fit: Fit

    def sessions(self, draw: Draw) -> list[Session]:
        """One request a session; the topic is the first block, which requests with a common beginning share."""
        taken = self.requests[: draw.requests]
        if draw.rate is None:
            first = taken[0].timestamp_ms
            arrivals = [(request.timestamp_ms - first) / 1000 * self.fit.time_scale for request in taken]
        else:
            arrivals = poisson_arrivals(
                Draw(draw.seed, draw.rate, min(len(taken), draw.requests or len(taken)), draw.duration_s)
            )
        return [
            Session(request.blocks[0], arrival, (self._turn(draw, request),))
            for request, arrival in zip(taken, arrivals, strict=False)
            if draw.duration_s is None or arrival < draw.duration_s
        ]

    def warm_texts(self, draw: Draw) -> list[str]:
        """Every request's prompt that no other begins with."""
        prompts = {session.turns[0].parts for session in self.sessions(draw)}
        beginnings = {parts[:length] for parts in prompts for length in range(1, len(parts))}
        return ["".join(map(str, parts)) for parts in sorted(prompts - beginnings, key=repr)]

    def capped(self, draw: Draw) -> int:
        """How many prompts are shorter than the trace says, but for its scale."""
        most = self.fit.most_prompt_tokens
        if most is None:
            return 0
        taken = self.requests[: len(self.sessions(draw))]
        return sum(request.input_tokens * self.fit.length_scale > most for request in taken)

    def _turn(self, draw: Draw, request: TraceRequest) -> Turn:
        fit = self.fit
        prompt = _scaled(request.input_tokens, fit.length_scale, fit.most_prompt_tokens)
        block_tokens = BLOCK_TOKENS * fit.length_scale
        whole = characters_of(block_tokens, fit.characters_per_token)
        parts = []
        for index, block in enumerate(request.blocks):
            rest = prompt - index * block_tokens
            if rest <= 0:
                break
            size = min(whole, characters_of(rest, fit.characters_per_token))
            parts.append(Block(f"run {draw.mark} block {block}", size, whole))
        return Turn(tuple(parts), _scaled(request.output_tokens, fit.length_scale, fit.most_output_tokens))


def _scaled(tokens: int, scale: float, most: int | None) -> int:
    scaled = max(1, round(tokens * scale))
    return scaled if most is None else min(scaled, most)


def read_trace(path: Path, most: int | None) -> tuple[TraceRequest, ...]:
    """The first `most` requests of a trace, by time. Raises ConfigError with the line that is not in Mooncake's
    form."""
    try:
        with path.open(encoding="utf-8") as file:
            numbered = ((number, line) for number, line in enumerate(file, start=1) if line.strip())
            requests = [_request(path, number, line) for number, line in islice(numbered, most)]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--trace {path} cannot be read: {error}; give a file with {_FORM}") from error
    if not requests:
        raise ConfigError(f"--trace {path} holds no request; give a file with {_FORM}")
    return tuple(sorted(requests, key=lambda request: request.timestamp_ms))


def _request(path: Path, number: int, line: str) -> TraceRequest:
    try:
        record: Any = json.loads(line)
        request = TraceRequest(
            float(record["timestamp"]),
            int(record["input_length"]),
            int(record["output_length"]),
            tuple(int(block) for block in record["hash_ids"]),
        )
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"--trace {path}, line {number} cannot be read ({type(error).__name__}: {error}); each line must be {_FORM}"
        ) from error
    needed = -(-request.input_tokens // BLOCK_TOKENS)
    if request.input_tokens < 1 or request.output_tokens < 1 or len(request.blocks) < needed:
        raise ConfigError(
            f"--trace {path}, line {number}: input_length {request.input_tokens} and output_length "
            f"{request.output_tokens} must be at least 1, and {len(request.blocks)} hash_ids at least {max(1, needed)}"
        )
    return request
