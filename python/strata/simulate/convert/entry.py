"""Requests one by one, as the simulator reads them: equal contexts are equal segments, so that simulated prompts share
what the data set's prompts share."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal

Order = Literal["shuffle", "minimum", "maximum"]
"""How many others come between two questions about one context: by chance, as few or as many as can be."""


@dataclass(frozen=True)
class Round:
    """A question and its answer, in tokens."""

    question: int
    answer: int


@dataclass(frozen=True)
class Context:
    """What rounds share: a document, or the beginning of a conversation; tokens may be 0 for a conversation."""

    tokens: int
    rounds: tuple[Round, ...]


def turns(contexts: Sequence[Context], order: Order, seed: int) -> list[int]:
    """Whose round comes when: the numbers of contexts, each as often as it has rounds."""
    longest = max(len(context.rounds) for context in contexts)
    taken = [
        number
        for turn in range(longest)
        for number, context in enumerate(contexts)
        if turn < len(context.rounds)
    ]
    if order == "minimum":
        taken.sort()
    elif order == "shuffle":
        random.Random(seed).shuffle(taken)
    return taken


def document_requests(contexts: Sequence[Context], order: Order, seed: int) -> list[dict[str, Any]]:
    """Each round asks about its context alone."""
    ids, asked, requests = count(len(contexts)), [0] * len(contexts), []
    for number in turns(contexts, order, seed):
        context, place = contexts[number], asked[number]
        asked[number] += 1
        prompt = [_segment(number, context.tokens), _segment(next(ids), context.rounds[place].question)]
        requests.append(_request(prompt, context.rounds[place].answer, next(ids), None))
    return requests


def conversation_requests(
    contexts: Sequence[Context], order: Order, seed: int, think_s: float
) -> list[dict[str, Any]]:
    """Each round's prompt is all that was said before in its conversation and a question, asked `think_s` seconds after
    the answer before."""
    ids, requests = count(len(contexts)), []
    said: list[list[dict[str, int]]] = [
        [_segment(number, context.tokens)] if context.tokens else []
        for number, context in enumerate(contexts)
    ]
    latest: list[int | None] = [None] * len(contexts)
    asked = [0] * len(contexts)
    for index, number in enumerate(turns(contexts, order, seed)):
        spoken = contexts[number].rounds[asked[number]]
        asked[number] += 1
        said[number].append(_segment(next(ids), spoken.question))
        before, latest[number] = latest[number], index
        answer = next(ids)
        after = None if before is None else {"request": before, "think_s": think_s}
        requests.append(_request(list(said[number]), spoken.answer, answer, after))
        said[number].append(_segment(answer, max(1, spoken.answer)))
    return requests


def _segment(number: int, tokens: int) -> dict[str, int]:
    return {"id": number, "tokens": max(1, tokens)}


def _request(
    prompt: list[dict[str, int]], output: int, answer: int, after: Mapping[str, Any] | None
) -> dict[str, Any]:
    # An answer of nothing is still one step of the model.
    request: dict[str, Any] = {"arrival_s": 0.0, "prompt": prompt, "output": max(1, output), "answer": answer}
    return request | ({"after": after} if after else {})


def law_of(values: Iterable[int]) -> dict[str, float]:
    """Count, mean, and the deviation of the logarithm: what a log-normal law of the table would be given."""
    numbers = [value for value in values if value > 0]
    if not numbers:
        return {"count": 0}
    logarithms = [math.log(value) for value in numbers]
    return {
        "count": len(numbers),
        "mean": round(statistics.fmean(numbers), 1),
        "sigma": round(statistics.pstdev(logarithms), 3),
        "least": min(numbers),
        "most": max(numbers),
    }


def statistics_of(contexts: Sequence[Context], requests: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the requests come to, in tokens: to be compared with the laws of the table of constants."""
    return {
        "contexts": len(contexts),
        "requests": len(requests),
        "prompt_tokens": law_of(
            sum(segment["tokens"] for segment in request["prompt"]) for request in requests
        ),
        "output_tokens": law_of(request["output"] for request in requests),
        "context_tokens": law_of(context.tokens for context in contexts),
        "question_tokens": law_of(each.question for context in contexts for each in context.rounds),
    }
