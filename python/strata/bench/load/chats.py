"""Chats of several rounds with time to think between them; each round resends the whole history."""

from __future__ import annotations

from dataclasses import dataclass

from strata.bench.corpus import Document
from strata.bench.load.schedule import Draw, Session, Turn, poisson_arrivals


@dataclass(frozen=True)
class ChatsWorkload:
    """Each chat opens with a text of its own and a question about it. `think_s` is the mean of an exponential time."""

    documents: tuple[Document, ...]
    rounds: int
    think_s: float
    max_tokens: int

    def sessions(self, draw: Draw) -> list[Session]:
        """A session a chat; chats arrive at the rate over the rounds, so that `rate` counts requests."""
        generator = draw.generator("thinking")
        sessions = []
        for number, arrival in enumerate(poisson_arrivals(draw, self.rounds)):
            questions = self._document(number).questions
            turns = [Turn((self._opening(draw, number), f"\n\n{questions[0]}"), self.max_tokens)]
            for index in range(1, self.rounds):
                think_s = generator.expovariate(1.0) * self.think_s
                text = f"Question {index + 1}: {questions[index % len(questions)]}"
                turns.append(Turn((text,), self.max_tokens, think_s))
            sessions.append(Session(number, arrival, tuple(turns)))
        return sessions

    def warm_texts(self, draw: Draw) -> list[str]:
        """Every chat's opening text."""
        return [self._opening(draw, number) for number in range(len(poisson_arrivals(draw, self.rounds)))]

    def _document(self, number: int) -> Document:
        return self.documents[number % len(self.documents)]

    def _opening(self, draw: Draw, number: int) -> str:
        return f"Chat {number + 1} of run {draw.mark}\n\n{self._document(number).text}"
