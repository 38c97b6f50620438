"""A run's own schedule as requests for the simulator: the same arrivals, thinking, tokens and shared beginnings.

Prompts are cut into short blocks, numbered by the tokens up to their end, so that two prompts share blocks exactly
where they begin alike. Answers are not known before a run; they are as long as was asked for, and only the rounds that
follow them share them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from strata.bench.load.client import CHAT
from strata.bench.load.schedule import Session
from strata.errors import ConfigError

BLOCK = 16
"""Tokens of a block, at most: what is shared is known as exactly as pages of so many tokens are."""


class Encoder(Protocol):
    """What is asked of a tokenizer."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids."""

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """A conversation's prompt."""


def explicit_workload(sessions: Sequence[Session], endpoint: str, tokenizer: Encoder) -> dict[str, Any]:
    """The simulator's `explicit` workload. Raises ConfigError for a chat template that rewrites what it was given
    before."""
    requests: list[dict[str, Any]] = []
    for number, session in enumerate(sessions):
        parts = _parts(session, endpoint, tokenizer)
        prompt: list[dict[str, int]] = []
        chain = b""
        for turn, (ids, asked) in enumerate(zip(parts, session.turns, strict=True)):
            if turn:
                answered = requests[-1]
                prompt = [*prompt, {"id": answered["answer"], "tokens": answered["output"]}]
                chain = hashlib.blake2b(
                    f"answer {number} {turn}".encode(), digest_size=8, key=chain[:8]
                ).digest()
            blocks, chain = _blocks(ids, chain)
            prompt = [*prompt, *blocks]
            follows = {"request": len(requests) - 1, "think_s": asked.think_s} if turn else None
            requests.append(
                {
                    "arrival_s": 0.0 if turn else session.arrival_s,
                    "after": follows,
                    "prompt": prompt,
                    "output": asked.max_tokens,
                    "answer": _number(hashlib.blake2b(f"{number} {turn}".encode(), digest_size=8).digest()),
                }
            )
    return {"kind": "explicit", "requests": requests}


def _parts(session: Session, endpoint: str, tokenizer: Encoder) -> list[list[int]]:
    """Tokens that each turn adds after the answer before it."""
    if endpoint != CHAT:
        return [tokenizer.encode(turn.text()) for turn in session.turns]
    messages: list[dict[str, str]] = []
    before: list[int] = []
    parts = []
    for turn in session.turns:
        messages.append({"role": "user", "content": turn.text()})
        whole = tokenizer.encode(tokenizer.apply_chat_template(messages), add_special_tokens=False)
        if whole[: len(before)] != before:
            raise ConfigError(
                "--workload chat: the model's chat template changes earlier rounds when one is added, so their tokens "
                "cannot be told before the run; predict documents instead"
            )
        parts.append(whole[len(before) :])
        before = whole
        messages.append({"role": "assistant", "content": ""})
    return parts


def _blocks(ids: Sequence[int], chain: bytes) -> tuple[list[dict[str, int]], bytes]:
    blocks = []
    for start in range(0, len(ids), BLOCK):
        block = ids[start : start + BLOCK]
        chain = hashlib.blake2b(repr(list(block)).encode(), digest_size=8, key=chain).digest()
        blocks.append({"id": _number(chain), "tokens": len(block)})
    return blocks, chain


def _number(digest: bytes) -> int:
    return int.from_bytes(digest, "little")
