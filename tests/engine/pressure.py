"""Many clients at once over pools that are too small for them: shared documents, several turns, random aborts."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, field

from engine_harness import VOCABULARY, nonzero, read, wait_idle, wrong_at

from strata.engine import Engine, GenerationRequest, SamplingParams
from strata.errors import StrataError
from strata.models import CausalLM

JOIN_S = 60.0
"""Far longer than all clients need together."""


@dataclass(frozen=True)
class Load:
    """What the clients do."""

    seed: int
    clients: int = 64
    documents: int = 5
    document_tokens: tuple[int, int] = (40, 130)
    question_tokens: tuple[int, int] = (1, 14)
    answer_tokens: tuple[int, int] = (1, 16)
    turns: int = 3
    abort_share: float = 0.25
    salts: tuple[str, ...] = ("",)
    pause_s: float = 0.0
    """Longest that a client thinks before each request."""

    @property
    def longest(self) -> int:
        """Most tokens that one request can hold."""
        return self.document_tokens[1] + self.turns * (self.question_tokens[1] + self.answer_tokens[1])


@dataclass
class Outcome:
    """What the clients saw."""

    finished: int = 0
    aborted: int = 0
    wrong: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    stuck: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


def run_clients(engine: Engine, model: CausalLM, load: Load, verify: bool = True) -> Outcome:
    """Runs all clients to their ends and, with `verify`, checks every token that any of them saw."""
    generator = random.Random(load.seed)
    documents = [
        [generator.randrange(VOCABULARY) for _ in range(generator.randint(*load.document_tokens))]
        for _ in range(load.documents)
    ]
    outcome, seen = Outcome(), []
    threads = [
        threading.Thread(
            target=_client,
            args=(engine, load, documents, generator.randrange(1 << 30), outcome, seen),
            name=f"client-{index}",
            daemon=True,
        )
        for index in range(load.clients)
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + JOIN_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            outcome.stuck.append(thread.name)
    for prompt, tokens in seen if verify else []:
        place = wrong_at(model, prompt, tokens)
        if place is not None:
            outcome.wrong.append(f"token {place} of {len(tokens)} after {len(prompt)} prompt tokens")
    return outcome


def _client(
    engine: Engine,
    load: Load,
    documents: list[list[int]],
    seed: int,
    outcome: Outcome,
    seen: list[tuple[list[int], list[int]]],
) -> None:
    generator = random.Random(seed)
    prompt = list(generator.choice(documents))
    salt = generator.choice(load.salts)
    for _ in range(generator.randint(1, load.turns)):
        prompt = prompt + [
            generator.randrange(VOCABULARY) for _ in range(generator.randint(*load.question_tokens))
        ]
        most = generator.randint(*load.answer_tokens)
        abort_after = generator.randint(0, most) if generator.random() < load.abort_share else None
        time.sleep(generator.random() * load.pause_s)
        request = GenerationRequest(prompt, SamplingParams(max_tokens=most), salt)
        try:
            answer = read(engine.submit(request), abort_after)
        except (StrataError, AssertionError) as error:
            with outcome.lock:
                outcome.errors.append(f"{type(error).__name__}: {error}")
            return
        with outcome.lock:
            seen.append((prompt, answer.tokens))
            if answer.reason == "abort":
                outcome.aborted += 1
            else:
                outcome.finished += 1
                if len(answer.tokens) != most:
                    outcome.wrong.append(f"{len(answer.tokens)} tokens came, {most} were due")
            usage = answer.last.usage
            if sum(answer.sources) != len(prompt):
                outcome.wrong.append(f"sources {answer.sources} of {usage.prompt_tokens} prompt tokens")
        prompt = prompt + answer.tokens


def device_pages(load: Load, page: int, share: float) -> int:
    """Pages for `share` times the longest request."""
    return int(load.longest * share) // page + 1


def assert_clean(engine: Engine, outcome: Outcome) -> None:
    """No wrong token, no error, no client left behind, no page held, the books in order."""
    assert not outcome.stuck, f"{outcome.stuck}: {nonzero(engine)}"
    assert not outcome.errors, outcome.errors[:3]
    assert not outcome.wrong, f"{len(outcome.wrong)} wrong: {outcome.wrong[:3]}"
    wait_idle(engine)
    assert engine.health().ok
    stats = engine.stats()
    assert stats["unknown_completions"] == stats["completions_lost"] == 0
