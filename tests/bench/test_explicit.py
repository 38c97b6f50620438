"""A schedule as the simulator's requests: lengths, arrivals and what is shared are the run's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from strata.bench.corpus import Document
from strata.bench.load.cache_distance import Distances
from strata.bench.load.chats import ChatsWorkload
from strata.bench.load.client import CHAT, COMPLETIONS
from strata.bench.load.documents import DocumentsWorkload
from strata.bench.load.explicit import BLOCK, explicit_workload
from strata.bench.load.schedule import Draw, Session, Turn
from strata.errors import ConfigError

TEXTS = {name: "".join(f"{name}{place} " for place in range(40)) for name in "abc"}
DOCUMENTS = tuple(Document(name, text, ("Who?", "Why?")) for name, text in TEXTS.items())


class Characters:
    """A token a character, and a template that marks who speaks."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """With one token before the text where special ones are wanted."""
        return [1] * add_special_tokens + [ord(character) for character in text]

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """`[u]question[a]answer[u]..[a]`."""
        return "".join(f"[{message['role'][0]}]{message['content']}" for message in messages) + "[a]"


class Forgetful(Characters):
    """A template that leaves earlier rounds out."""

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The last message alone."""
        return f"<{messages[-1]['content']}>"


def tokens(request: dict[str, Any]) -> int:
    return sum(segment["tokens"] for segment in request["prompt"])


def shared(one: dict[str, Any], other: dict[str, Any]) -> int:
    """Tokens with which two prompts begin alike."""
    count = 0
    for mine, theirs in zip(one["prompt"], other["prompt"], strict=False):
        if mine != theirs:
            break
        count += mine["tokens"]
    return count


def test_questions_share_what_their_texts_share() -> None:
    sessions = DocumentsWorkload(DOCUMENTS, Distances(least=0), 7).sessions(Draw(3, 2.0, requests=9))
    requests = explicit_workload(sessions, COMPLETIONS, Characters())["requests"]
    assert [request["arrival_s"] for request in requests] == [session.arrival_s for session in sessions]
    texts = [session.turns[0].text() for session in sessions]
    assert [tokens(request) for request in requests] == [1 + len(text) for text in texts]
    assert {request["output"] for request in requests} == {7}
    assert len({request["answer"] for request in requests}) == 9
    for one, first in zip(requests, texts, strict=True):
        for other, second in zip(requests, texts, strict=True):
            alike = 1 + next(
                (place for place, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
                min(len(first), len(second)),
            )
            if one is not other:
                assert shared(one, other) == alike // BLOCK * BLOCK
    same = [
        (one, two) for one in range(9) for two in range(one) if sessions[one].topic == sessions[two].topic
    ]
    assert same and all(shared(requests[one], requests[two]) > 100 for one, two in same)


def test_rounds_follow_their_answers_and_hold_them() -> None:
    sessions = ChatsWorkload(DOCUMENTS, 3, 2.0, 5).sessions(Draw(1, 1.0, requests=6))
    requests = explicit_workload(sessions, CHAT, Characters())["requests"]
    assert len(requests) == 6
    template = Characters()
    for number, session in enumerate(sessions):
        messages: list[dict[str, str]] = []
        for turn, asked in enumerate(session.turns):
            request = requests[3 * number + turn]
            messages.append({"role": "user", "content": asked.text()})
            assert tokens(request) == len(template.apply_chat_template(messages))
            messages.append({"role": "assistant", "content": "*" * asked.max_tokens})
            if turn == 0:
                assert (request["arrival_s"], request["after"]) == (session.arrival_s, None)
                continue
            before = requests[3 * number + turn - 1]
            assert request["after"] == {"request": 3 * number + turn - 1, "think_s": asked.think_s}
            assert shared(before, request) == tokens(before)
            answer = request["prompt"][len(before["prompt"])]
            assert answer == {"id": before["answer"], "tokens": 5}
    assert shared(requests[0], requests[3]) < tokens(requests[0])


def test_a_template_that_rewrites_the_past_is_refused() -> None:
    chat = [Session(0, 0.0, (Turn(("one",), 4), Turn(("two",), 4, 1.0)))]
    with pytest.raises(ConfigError, match="changes earlier rounds"):
        explicit_workload(chat, CHAT, Forgetful())
