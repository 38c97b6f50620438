"""A prefix cache over pages that the caller owns. It knows which page holds which tokens, never the bytes.

The order of use: `match` a prompt and keep the match while its pages are read; `reserve` pages for the rest; once
their K/V is written, `commit` them, or `abort` them. A page matches only after it was committed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

import numpy as np
import numpy.typing as npt

from strata._core import PageCache, PinnedPages
from strata.cache.ids import id_array

Tokens = Sequence[int] | npt.NDArray[np.uint32]


@dataclass(frozen=True)
class Match:
    """The cached prefix of a sequence: `tokens` of it lie in `pages` (uint32, first page first).

    The pages stay where they are until `release`, or the end of the `with` block.
    """

    tokens: int
    pages: npt.NDArray[np.uint32]
    _pinned: PinnedPages

    def release(self) -> None:
        """Lets the pages be evicted again. Idempotent."""
        self._pinned.release()

    def __enter__(self) -> Match:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Cache:
    """`pages` pages of `page_size` tokens, all free. May be shared between threads.

    Raises RequestError for a size of zero.
    """

    def __init__(self, pages: int, page_size: int = 16) -> None:
        self._pages = PageCache(page_size, pages)
        self.page_size = page_size

    def match(self, tokens: Tokens, salt: str = "") -> Match:
        """Finds and pins the longest cached prefix of whole pages. Entries of two salts never match."""
        pinned = self._pages.pin(id_array(tokens, "tokens"), salt=salt)
        return Match(pinned.tokens, pinned.pages, pinned)

    def reserve(self, count: int) -> npt.NDArray[np.uint32]:
        """Page ids (uint32) to write into, the least recently used evicted. Raises CapacityError if pinned and
        reserved pages leave fewer than `count`."""
        return self._pages.reserve(count)

    def commit(
        self, tokens: Tokens, pages: npt.NDArray[np.uint32], from_page: int = 0, salt: str = ""
    ) -> list[int]:
        """Makes reserved `pages`, whose K/V is written, match as pages `from_page`.. of `tokens`.

        Returns the pages that were cached already: those are free again, and must not be used any more. Raises
        RequestError if the pages before `from_page` are not cached.
        """
        return self._pages.commit(id_array(tokens, "tokens"), id_array(pages, "pages"), from_page, salt=salt)

    def abort(self, pages: npt.NDArray[np.uint32]) -> None:
        """Gives reserved pages back. Raises StorageError for a page that is not reserved."""
        self._pages.abort(id_array(pages, "pages"))

    def usage(self) -> dict[str, int]:
        """Pages by state: `capacity`, `free`, `cached`, and `pinned` among the cached."""
        capacity, free, cached, pinned = self._pages.pages()
        return {"capacity": capacity, "free": free, "cached": cached, "pinned": pinned}

    def check(self) -> None:
        """Proves that the books agree. Raises StorageError with what does not."""
        self._pages.check()
