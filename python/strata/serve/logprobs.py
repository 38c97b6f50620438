"""Log probabilities in OpenAI's two shapes: columns for completions, a list of objects for chats.

A token is shown by its text. One that holds a part of a character has none: it is shown by its bytes, as OpenAI does,
`bytes:\\xf0\\x9f`, so that no two look the same. `bytes` are always the token's own, and together they are the text.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from strata.engine.api import TokenLogprob

_LEAST = -9999.0
"""Stands for minus infinity, which JSON has no number for."""


class ShownTokens:
    """The tokens of one text in their order: how each is shown, and where in the text it begins.

    With vLLM's `return_tokens_as_token_ids`, and where there is no tokenizer, they are shown by their ids.
    """

    def __init__(
        self,
        tokenizer: Any,
        as_ids: bool = False,
        skip_special: bool = True,
        start: int = 0,
        before: Sequence[int] = (),
    ) -> None:
        """The text begins `start` characters after the one that offsets count from, and goes on with that of the tokens
        `before`."""
        self._tokenizer = tokenizer
        self._as_ids = as_ids or tokenizer is None
        self._skip_special = skip_special
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._place = start
        """Characters of the text that are whole, and of what is before it."""
        self._begins = tokenizer is None or tokenizer.is_empty(before, skip_special)

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of a token in the present place."""
        return self._tokenizer.token_bytes(token_id, self._begins) if self._tokenizer else b""

    def name_of(self, token_id: int) -> str:
        """How a token in the present place is shown."""
        if self._as_ids:
            return _named_by_id(token_id)
        data = self.bytes_of(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def push(self, token_id: int) -> int:
        """Goes on to the next place. Returns where this token begins, or the character that it goes on with."""
        place = self._place
        if self._tokenizer is None or not self._tokenizer.is_shown(token_id, self._skip_special):
            return place
        data = self.bytes_of(token_id)
        self._begins = False
        first = self._characters.decode(data[:1])
        goes_on = bool(self._characters.getstate()[0])
        self._place += len(first) + len(self._characters.decode(data[1:]))
        # Its character is the last of these, or not whole yet; one before has come to nothing and shows as U+FFFD.
        return place + (len(first) if goes_on else max(0, len(first) - 1))


@dataclass
class LogprobColumns:
    """`logprobs` of one choice of a completion, which go on where the last ones ended."""

    columns: dict[str, list[Any]] = field(default_factory=lambda: _empty())

    def add(
        self,
        token_ids: Sequence[int],
        entries: Sequence[TokenLogprob | None],
        tokens: ShownTokens,
        offsets: Sequence[int] | None = None,
    ) -> None:
        """Adds tokens; None for a token that nothing predicts, the first of a prompt. `offsets` for a text that is not
        what its tokens say."""
        for number, (token_id, entry) in enumerate(zip(token_ids, entries, strict=True)):
            self.columns["tokens"].append(tokens.name_of(token_id))
            self.columns["token_logprobs"].append(None if entry is None else _finite(entry.logprob))
            self.columns["top_logprobs"].append(None if entry is None else _top(entry, tokens))
            place = tokens.push(token_id)
            self.columns["text_offset"].append(place if offsets is None else offsets[number])

    def take(self) -> dict[str, list[Any]] | None:
        """What was added since the last call; None for nothing."""
        taken, self.columns = self.columns, _empty()
        return taken if taken["tokens"] else None


def _top(entry: TokenLogprob, tokens: ShownTokens) -> dict[str, float]:
    """By name, the likeliest first; the token itself is always among them. One that looks like another is named by its
    id."""
    own = tokens.name_of(entry.token_id)
    top: dict[str, float] = {}
    for token_id, value in (*entry.top, (entry.token_id, entry.logprob)):
        name = own if token_id == entry.token_id else tokens.name_of(token_id)
        if token_id != entry.token_id and (name == own or name in top):
            name = _named_by_id(token_id)
        top.setdefault(name, _finite(value))
    return top


def _named_by_id(token_id: int) -> str:
    return f"token_id:{token_id}"


def _empty() -> dict[str, list[Any]]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def chat_logprobs(entries: Sequence[TokenLogprob], tokens: ShownTokens) -> dict[str, Any]:
    """`logprobs` of one choice of a chat; `tokens` goes on where the last ones ended."""
    content = []
    for entry in entries:
        top = [_chat_token(token_id, value, tokens) for token_id, value in entry.top]
        content.append({**_chat_token(entry.token_id, entry.logprob, tokens), "top_logprobs": top})
        tokens.push(entry.token_id)
    return {"content": content, "refusal": None}


def _chat_token(token_id: int, logprob: float, tokens: ShownTokens) -> dict[str, Any]:
    data = tokens.bytes_of(token_id)
    return {"token": tokens.name_of(token_id), "logprob": _finite(logprob), "bytes": list(data)}


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)
