"""Where a prompt parts from an earlier one, and a sentence that says why it was not found in the cache as a whole.

Only prompts of one salt are compared, so that nothing of a tenant is said beside another's request.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from strata.engine.api import TokenSources

MOST_PROMPTS = 64
MOST_TOKENS = 4 << 20
"""16 MiB of token ids."""
_FIRST_LOOK = 64
"""Tokens compared at first: unrelated prompts part early."""
_BEFORE, _AFTER = 12, 8
"""Tokens of an excerpt before and after the point where two prompts part."""

Tokens = npt.NDArray[np.uint32]


@dataclass
class Kept:
    """A request that later ones are compared with. `answer` grows while it is generated."""

    number: int
    salt: str
    prompt: Tokens
    answer: list[int] = field(default_factory=list)
    flushed: bool = False
    """Whether the cache was flushed since."""


@dataclass(frozen=True)
class Excerpt:
    """Token ids around the point where two prompts part: what both have, then what each has."""

    before: tuple[int, ...]
    here: tuple[int, ...]
    there: tuple[int, ...]


@dataclass(frozen=True)
class Comparison:
    """The earlier request that a prompt shares most tokens with, the latest of them. `other` is None where none shares
    any; `compared` says with how many. `other_prompt` and `other_length` are its tokens without and with its answer,
    `flushed` says whether the cache was flushed since. `forgot`: this server has had requests that it compares with no
    more."""

    shared: int = 0
    other: int | None = None
    other_prompt: int = 0
    other_length: int = 0
    compared: int = 0
    flushed: bool = False
    forgot: bool = False
    excerpt: Excerpt | None = None


class EarlierPrompts:
    """The latest prompts, at most `MOST_PROMPTS` and about `MOST_TOKENS` tokens of them. Safe from any thread."""

    def __init__(self, excerpts: bool) -> None:
        """Without `excerpts`, comparisons hold no token ids."""
        self._excerpts = excerpts
        self._lock = threading.Lock()
        self._kept: deque[Kept] = deque()
        self._tokens = 0
        self._forgot = False

    def add(self, new: Kept) -> Comparison:
        """Compares a prompt with the earlier ones of its salt, then keeps it."""
        with self._lock:
            earlier = [each for each in reversed(self._kept) if each.salt == new.salt]
            self._kept.append(new)
            self._tokens += len(new.prompt)
            while len(self._kept) > 1 and (len(self._kept) > MOST_PROMPTS or self._tokens > MOST_TOKENS):
                self._tokens -= len(self._kept.popleft().prompt)
                self._forgot = True
            forgot = self._forgot
        # Outside of the lock: other requests need not wait for 100,000 tokens to be compared.
        return replace(compare(new.prompt, earlier, self._excerpts), forgot=forgot)

    def flushed(self) -> None:
        """The cache was flushed: what the earlier prompts left there is gone."""
        with self._lock:
            for kept in self._kept:
                kept.flushed = True


def compare(prompt: Tokens, earlier: Sequence[Kept], excerpts: bool = True) -> Comparison:
    """The longest beginning that `prompt` shares with one of `earlier`, prompts and answers."""
    shared, closest = 0, None
    for other in earlier:
        if shared == len(prompt):
            break
        if _tokens(other, shared, shared + 1) != [int(prompt[shared])]:
            continue
        length = _shared_length(prompt, other)
        if length > shared:
            shared, closest = length, other
    if closest is None:
        return Comparison(compared=len(earlier))
    length = len(closest.prompt) + len(closest.answer)
    excerpt = None
    if excerpts and shared < min(len(prompt), length):
        excerpt = Excerpt(
            tuple(prompt[max(0, shared - _BEFORE) : shared].tolist()),
            tuple(prompt[shared : shared + _AFTER].tolist()),
            tuple(_tokens(closest, shared, shared + _AFTER)),
        )
    return Comparison(
        shared,
        closest.number,
        len(closest.prompt),
        length,
        len(earlier),
        flushed=closest.flushed,
        excerpt=excerpt,
    )


def is_whole(sources: TokenSources, page_size: int) -> bool:
    """Whether as much of a prompt was cached as can be. Its last token is computed in every case, since the next one is
    sampled from it."""
    return sources.cached >= _whole_pages(sources.cached + sources.computed - 1, page_size)


def why(sources: TokenSources, page_size: int, comparison: Comparison) -> str:
    """What became of a prompt's hit, in a sentence, to an operator who wonders why it was not longer."""
    prompt_tokens = sources.cached + sources.computed
    if prompt_tokens <= page_size:
        return f"not longer than a page of {page_size} tokens: such prompts are always computed"
    if is_whole(sources, page_size):
        return "all of it was cached, but for the last page, which is always computed"
    before = f"request {comparison.other}"
    known = _whole_pages(min(comparison.shared, prompt_tokens - 1), page_size)
    if sources.cached < known:
        lost = known - sources.cached
        flushed = "flushed, " if comparison.flushed else ""
        return (
            f"shares its first {comparison.shared:,} tokens with {before}; {lost:,} of these were {flushed}evicted, "
            "not written yet, or quicker to compute"
        )
    if sources.cached > known:
        when = "too long ago to compare with" if comparison.forgot else "before this server started"
        return f"matched {sources.cached:,} tokens of a request {when}"
    if comparison.other is None:
        return "the first request of its salt" if not comparison.compared else "the first to begin like this"
    if comparison.shared >= comparison.other_length:
        return f"goes on where {before} ended, at token {comparison.shared:,}"
    answered = comparison.shared >= comparison.other_prompt
    place = f"the answer of {before}" if answered else before
    return f"diverged at token {comparison.shared:,} from {place}" + (
        "" if known else ", within the first page"
    )


def _shared_length(prompt: Tokens, other: Kept) -> int:
    length = _common(prompt, other.prompt)
    if length < len(other.prompt) or length == len(prompt) or not other.answer:
        return length
    return length + _common(prompt[length:], np.array(other.answer[: len(prompt) - length], dtype=np.uint32))


def _common(one: Tokens, other: Tokens) -> int:
    """Tokens at which both begin alike, looked for in steps that grow."""
    most, start, step = min(len(one), len(other)), 0, _FIRST_LOOK
    while start < most:
        end = min(start + step, most)
        differ = one[start:end] != other[start:end]
        if differ.any():
            return start + int(differ.argmax())
        start, step = end, step * 4
    return most


def _tokens(kept: Kept, start: int, end: int) -> list[int]:
    """Tokens of prompt and answer, as far as there are any."""
    prompt = len(kept.prompt)
    asked: list[int] = kept.prompt[start:end].tolist()
    return asked + kept.answer[max(0, start - prompt) : max(0, end - prompt)]


def _whole_pages(tokens: int, page_size: int) -> int:
    return tokens // page_size * page_size
