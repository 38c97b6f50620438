"""An order of requests over documents that keeps each document's cache distance within bounds.

The cache distance is the number of other documents' requests between two requests of one document.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from strata.errors import ConfigError


@dataclass(frozen=True)
class Distances:
    """The bounds; no `most` means none. `questions` is how often each document is asked about; None: to the end."""

    least: int = 0
    most: int | None = None
    questions: int | None = None

    def check(self, documents: int, count: int) -> None:
        """Raises ConfigError if no order of `count` requests can keep the bounds."""
        if self.least >= documents:
            raise ConfigError(
                f"--min-distance {self.least} needs more than {self.least} documents, and there are {documents}; give "
                f"--documents {self.least + 1} or a smaller distance"
            )
        if self.most is not None and self.most < self.least:
            raise ConfigError(
                f"--max-distance {self.most} is below --min-distance {self.least}; raise it or lower the other"
            )
        if self.most is not None and self.questions is None and self.most < documents - 1:
            raise ConfigError(
                f"--max-distance {self.most} keeps {self.most + 1} of --documents {documents} busy for ever: give "
                "--questions, after which a document makes way, or fewer documents"
            )
        if self.questions is not None and documents * self.questions < count:
            raise ConfigError(
                f"{count} requests are to arrive, and --documents {documents} with --questions {self.questions} make "
                f"{documents * self.questions}; give more of either, or lower --rates, --duration or --requests"
            )


def shuffled_order(documents: int, count: int, distances: Distances, generator: random.Random) -> list[int]:
    """The document of each request. Raises ConfigError if the bounds cannot be kept."""
    distances.check(documents, count)
    left = dict.fromkeys(range(documents), distances.questions or count)
    last: dict[int, int] = {}
    order: list[int] = []
    for position in range(count):
        chosen = _choose(position, left, last, distances, generator)
        if chosen is None:
            raise ConfigError(
                f"--min-distance {distances.least} leaves no document to ask about after {position} of {count} "
                "requests; give more --documents or --questions, fewer requests, or a smaller distance"
            )
        order.append(chosen)
        last[chosen] = position
        left[chosen] -= 1
        if not left[chosen]:
            del left[chosen]
    return order


def _choose(
    position: int,
    left: Mapping[int, int],
    last: Mapping[int, int],
    distances: Distances,
    generator: random.Random,
) -> int | None:
    """A document that may be asked about now, the likelier the more of its questions are left."""
    choices = [
        document
        for document in left
        if document not in last or position - last[document] - 1 >= distances.least
    ]
    while choices:
        (chosen,) = generator.choices(choices, [left[document] for document in choices])
        if distances.most is None or _keeps(position, chosen, left, last, distances.most):
            return chosen
        choices.remove(chosen)
    return None


def _keeps(position: int, chosen: int, left: Mapping[int, int], last: Mapping[int, int], most: int) -> bool:
    """Whether all documents that are begun can still come in time if `chosen` is asked about now: served in the order
    of their deadlines, each has a place."""
    deadlines = [last[document] + 1 + most for document in left if document != chosen and document in last]
    if left[chosen] > 1:
        deadlines.append(position + 1 + most)
    return all(deadline > position + place for place, deadline in enumerate(sorted(deadlines)))


def measured_distances(order: Sequence[int]) -> list[int]:
    """The cache distance of every request that is not its document's first."""
    last: dict[int, int] = {}
    found = []
    for position, document in enumerate(order):
        if document in last:
            found.append(position - last[document] - 1)
        last[document] = position
    return found
