"""Time: a total, and a share of it for each section, so that the script ends when it said it would."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Budget:
    """``total_s`` seconds from now on. What a section leaves is there for the next ones."""

    total_s: float
    clock: Callable[[], float] = time.monotonic
    left_out: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._end = self.clock() + self.total_s
        self._section_end = self._end

    def begin(self, share_s: float) -> None:
        """A section begins that may take ``share_s`` seconds, and never more than there are."""
        self._section_end = min(self._end, self.clock() + share_s)

    def left_s(self) -> float:
        """Seconds that the section still has."""
        return max(0.0, self._section_end - self.clock())

    def allows(self, what: str, about_s: float = 0.0) -> bool:
        """Whether there is time for something of ``about_s`` seconds; what there is no time for is noted."""
        if self.left_s() > about_s:
            return True
        self.left_out.append(what)
        return False
