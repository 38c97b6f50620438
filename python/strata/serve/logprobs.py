"""Log probabilities in OpenAI's two shapes: columns for completions, a list of objects for chats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from strata.engine.api import TokenLogprob

TokenText = Callable[[int], str]
"""The text of one token."""
_LEAST = -9999.0
"""Stands for minus infinity, which JSON has no number for."""


def token_text_of(tokenizer: Any, as_ids: bool) -> TokenText:
    """How tokens are shown: by their text, or in a way that no two share with vLLM's `return_tokens_as_token_ids` and
    where there is no tokenizer."""
    if as_ids or tokenizer is None:
        return lambda token_id: f"token_id:{token_id}"
    text_of: TokenText = tokenizer.token_text
    return text_of


@dataclass
class LogprobColumns:
    """`logprobs` of one choice of a completion, which go on where the last ones ended."""

    text_of: TokenText
    offset: int = 0
    """Characters of the choice's text so far."""
    columns: dict[str, list[Any]] = field(default_factory=lambda: _empty())

    def add(self, token_ids: Sequence[int], entries: Sequence[TokenLogprob | None]) -> None:
        """Adds tokens; None for a token that nothing predicts, the first of a prompt."""
        for token_id, entry in zip(token_ids, entries, strict=True):
            text = self.text_of(token_id)
            self.columns["tokens"].append(text)
            self.columns["token_logprobs"].append(None if entry is None else _finite(entry.logprob))
            self.columns["top_logprobs"].append(None if entry is None else self._top(entry))
            self.columns["text_offset"].append(self.offset)
            self.offset += len(text)

    def take(self) -> dict[str, list[Any]] | None:
        """What was added since the last call; None for nothing."""
        taken, self.columns = self.columns, _empty()
        return taken if taken["tokens"] else None

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """By text, the likeliest first; the token itself is always among them. Of two tokens that look the same the
        likelier one counts."""
        top: dict[str, float] = {}
        for token_id, value in (*entry.top, (entry.token_id, entry.logprob)):
            top.setdefault(self.text_of(token_id), _finite(value))
        return top


def _empty() -> dict[str, list[Any]]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def chat_logprobs(entries: Sequence[TokenLogprob], text_of: TokenText) -> dict[str, Any]:
    """`logprobs` of one choice of a chat."""
    content = [
        {
            **_chat_token(entry.token_id, entry.logprob, text_of),
            "top_logprobs": [_chat_token(token_id, value, text_of) for token_id, value in entry.top],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _chat_token(token_id: int, logprob: float, text_of: TokenText) -> dict[str, Any]:
    text = text_of(token_id)
    return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode())}


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)
