"""What is sent, and when: drawn whole before the clock starts, so that equal seeds give equal runs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from strata.errors import ConfigError

_COMMON_WORDS = (
    "about after again air all along also always animal another answer any around ask away back because before "
    "begin below between book both build call can car carry change children city close come could country cut day "
    "different does done down each early earth eat end enough even every example eye face family far father feet "
    "few find first follow food form found four from gave get give good great group grow had hand hard head hear "
    "help here high home house idea important into just keep kind know land large last later learn leave left "
    "letter life light like line list little live long look made make man many may men might mile more most mother "
    "mountain move much must name near need never new next night now number off often old once one only open other "
    "our out over own page paper part people place plant play point read real right river run said same saw say "
    "school sea second see seem sentence set she should show side small some something song soon sound spell stand "
    "start state still stop story study such take talk tell than that their them then there these they thing think"
)
"""Short common words: most tokenizers have one token for each, with the space before it."""
_WORDS = tuple(_COMMON_WORDS.split())


@dataclass(frozen=True)
class Block:
    """Made-up text of `characters` characters. Equal `key`s give equal text, a shorter one its beginning."""

    key: str
    characters: int
    whole_characters: int

    def __str__(self) -> str:
        return _block_text(self.key, self.whole_characters)[: self.characters]


@lru_cache(maxsize=8192)
def _block_text(key: str, characters: int) -> str:
    generator = random.Random(key)
    # No word with its space has fewer than three characters.
    words = generator.choices(_WORDS, k=characters // 3 + 1)
    return "".join(f" {word}" for word in words)[:characters]


@dataclass(frozen=True)
class Turn:
    """One request: its text is that of its parts; the client waits `think_s` after the answer before it."""

    parts: tuple[str | Block, ...]
    max_tokens: int
    think_s: float = 0.0

    def text(self) -> str:
        """The text, made anew: a long trace's texts do not fit in memory at once."""
        return "".join(map(str, self.parts))


@dataclass(frozen=True)
class Session:
    """Requests one after the other, each with the history before it. `topic` says which share text."""

    topic: int
    arrival_s: float
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class Draw:
    """Which run is drawn. `rate` in requests a second; None leaves times to the workload. At least one of `requests`
    and `duration_s` ends it, unless the workload ends by itself. `keeps_documents`: documents, unlike questions, are
    the same in all runs.
    """

    seed: int
    rate: float | None
    requests: int | None = None
    duration_s: float | None = None
    keeps_documents: bool = False

    @property
    def mark(self) -> str:
        """Part of this run's texts, so that no run finds what another left in a cache."""
        return f"{self.seed}" if self.rate is None else f"{self.seed} at {self.rate}/s"

    def generator(self, purpose: str) -> random.Random:
        """Random numbers of their own for each purpose; the same at every rate, so that rates can be compared."""
        return random.Random(f"{purpose} {self.seed}")


class Workload(Protocol):
    """Draws runs. Raises ConfigError where flags ask for what cannot be."""

    def sessions(self, draw: Draw) -> list[Session]:
        """All of a run, by time of arrival."""

    def warm_texts(self, draw: Draw) -> list[str]:
        """What a warm start sends, so that the server has seen what the run's requests share."""


def poisson_arrivals(draw: Draw, requests_a_session: int = 1) -> list[float]:
    """Seconds at which sessions arrive. Raises ConfigError if none does."""
    if draw.rate is None:
        raise ConfigError("--rates is missing, and without it nothing says when requests arrive")
    most = None if draw.requests is None else -(-draw.requests // requests_a_session)
    generator = draw.generator("arrivals")
    arrivals: list[float] = []
    now = 0.0
    while most is None or len(arrivals) < most:
        now += generator.expovariate(1.0) * requests_a_session / draw.rate
        if draw.duration_s is not None and now >= draw.duration_s:
            break
        arrivals.append(now)
    if not arrivals:
        raise ConfigError(
            f"--duration {draw.duration_s:g} is over before the first request arrives at --rates {draw.rate:g} with "
            f"seed {draw.seed}; give a longer one, or --requests instead"
        )
    return arrivals


def characters_of(tokens: float, characters_per_token: float) -> int:
    """Characters of a text of about so many tokens."""
    return max(1, round(tokens * characters_per_token))


def sample_words(characters: int) -> Sequence[str]:
    """A text such as blocks hold, to learn how many tokens a server makes of it."""
    return [_block_text("sample", characters)]
