"""From sampled tokens to the text of a stream: whole characters, and nothing of a stop text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Detokenizer(Protocol):
    """What `strata.models.IncrementalDetokenizer` offers."""

    def push(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


class StoppingText:
    """Releases text as soon as it cannot be the beginning of a stop text any more. With `include_stop` the answer ends
    with the stop text that ended it."""

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str], include_stop: bool = False) -> None:
        self._detokenizer = detokenizer
        self._include_stop = include_stop
        self._stops = [stop for stop in stops if stop]
        self._pending = ""
        self.found: str | None = None
        """The stop text that ended the answer."""

    def push(self, token_id: int, may_stop: bool = True) -> tuple[str, bool]:
        """The text that can be shown after this token, and whether a stop text is complete. Where the answer may not
        stop yet, a stop text is text like any other."""
        piece = self._detokenizer.push(token_id)
        if not may_stop:
            return piece, False
        return self._take(piece)

    def finish(self) -> str:
        """What is left at the end of an answer that no stop text ended."""
        text, stopped = self._take(self._detokenizer.finish())
        if not stopped:
            text += self._pending
        self._pending = ""
        return text

    def _take(self, piece: str) -> tuple[str, bool]:
        text = self._pending + piece
        found = [(place, stop) for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            self._pending = ""
            first, stop = min(found)
            self.found = stop
            return text[: first + len(stop)] if self._include_stop else text[:first], True
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._pending = text[len(text) - held :]
        return text[: len(text) - held], False


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that is a beginning of `stop`, and shorter than it."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
