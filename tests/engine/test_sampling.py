"""What comes out depends on the request alone; answers end where they were asked to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from engine_harness import MakeEngine, Sizes, ask, read, wait_idle
from hypothesis import given
from hypothesis import strategies as st

from strata.engine import Engine, GenerationRequest, SamplingParams, ServedModel
from strata.engine.logit_rules import Row
from strata.engine.sampler import sample_rows
from strata.engine.text import StoppingText

PROMPT = [(3 * place + 2) % 97 for place in range(30)]
WARM = {"temperature": 1.3, "seed": 1234}


class CharacterTokenizer:
    """A character a token. Token 5 is the end."""

    eos_token_ids = frozenset({5})

    def detokenizer(
        self, skip_special_tokens: bool = True, before: Sequence[int] = ()
    ) -> CharacterDetokenizer:
        return CharacterDetokenizer()


class CharacterDetokenizer:
    def push(self, token_id: int) -> str:
        return chr(ord("0") + token_id)

    def finish(self) -> str:
        return ""


def text_of(tokens: list[int]) -> str:
    return "".join(CharacterDetokenizer().push(token) for token in tokens)


@pytest.fixture
def texted(served: ServedModel) -> ServedModel:
    """The tiny model with a tokenizer."""
    return ServedModel(served.model, CharacterTokenizer(), "texted", "texted")  # type: ignore[arg-type]


def test_a_seed_decides_whatever_runs_beside(make_engine: MakeEngine) -> None:
    alone = ask(make_engine(), PROMPT, 24, **WARM).tokens
    crowded = make_engine(sizes=Sizes(device=20, host=40, disk_bytes=0))
    streams = []
    for index in range(12):
        prompt = PROMPT if index == 6 else [index, *PROMPT[index:]]
        params = SamplingParams(
            max_tokens=24, **(WARM if index == 6 else {"temperature": 0.9, "seed": index})
        )
        streams.append(crowded.submit(GenerationRequest(prompt, params)))
    answers = [read(stream) for stream in streams]
    assert answers[6].tokens == alone
    assert crowded.stats()["preemptions"] > 0, "nobody was preempted: the pool is too large for this test"
    wait_idle(crowded)


def test_seeds_differ_and_repeat(make_engine: MakeEngine) -> None:
    engine = make_engine()
    answers = [tuple(ask(engine, PROMPT, 16, temperature=1.5, seed=seed).tokens) for seed in range(6)]
    assert len(set(answers)) == 6
    assert [tuple(ask(engine, PROMPT, 16, temperature=1.5, seed=seed).tokens) for seed in range(6)] == answers
    unseeded = {tuple(ask(engine, PROMPT, 16, temperature=1.5).tokens) for _ in range(4)}
    assert len(unseeded) == 4


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 1.5, "top_k": 1},
        {"temperature": 1.5, "top_p": 1e-9},
        {"temperature": 1e-6},
        {"temperature": 1e-310},
        {"temperature": 1e-310, "top_p": 0.5},
    ],
)
def test_limits_that_leave_one_token_are_greedy(make_engine: MakeEngine, sampling: dict[str, float]) -> None:
    engine = make_engine()
    assert ask(engine, PROMPT, 12, seed=3, **sampling).tokens == ask(engine, PROMPT, 12).tokens


def test_top_k_and_top_p_bound_every_token(make_engine: MakeEngine, served: ServedModel) -> None:
    engine = make_engine()
    for seed in range(6):
        few = ask(engine, PROMPT, 16, temperature=2.0, seed=seed, top_k=3).tokens
        logits = served.model.reference_forward([*PROMPT, *few[:-1]])[len(PROMPT) - 1 :]
        for row, token in zip(logits, few, strict=True):
            assert token in row.topk(3).indices.tolist()
        likely = ask(engine, PROMPT, 16, temperature=2.0, seed=seed, top_p=0.4).tokens
        logits = served.model.reference_forward([*PROMPT, *likely[:-1]])[len(PROMPT) - 1 :]
        for row, token in zip((logits / 2.0).softmax(-1), likely, strict=True):
            assert float(row[row > row[token]].sum()) < 0.4


def test_frequencies_follow_the_softmax() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0, 0.5]], dtype=torch.float64)
    params, draws = SamplingParams(temperature=0.8), 4000
    tokens = [
        sample_rows(logits.clone(), [Row(params, seed=9, output=[0] * place)])[0].token_id
        for place in range(draws)
    ]
    found = np.bincount(tokens, minlength=5) / draws
    due = (logits[0] / 0.8).softmax(-1).numpy()
    # Fixed seeds: five standard deviations are no matter of luck.
    assert (np.abs(found - due) < 5 * np.sqrt(due * (1 - due) / draws)).all()


def test_max_tokens(make_engine: MakeEngine) -> None:
    engine = make_engine()
    whole = ask(engine, PROMPT, 20).tokens
    for most in (1, 2, 7):
        answer = ask(engine, PROMPT, most)
        assert (answer.tokens, answer.reason) == (whole[:most], "length")
        assert answer.last is not None and answer.last.usage is not None
        assert answer.last.usage.completion_tokens == most


def test_stop_token_ids(make_engine: MakeEngine) -> None:
    engine = make_engine()
    whole = ask(engine, PROMPT, 20).tokens
    stop = whole[6]
    place = whole.index(stop)
    answer = ask(engine, PROMPT, 20, stop_token_ids=(stop, 10**6, -1))
    assert (answer.tokens, answer.reason) == (whole[: place + 1], "stop")
    assert answer.last is not None and answer.last.stopped_by == stop
    wait_idle(engine)
    # What came after the end is not part of the answer: the next turn goes on from the end.
    assert ask(engine, PROMPT, 20).tokens == whole


@pytest.mark.parametrize("stops", [(), (10**6,), (-300,)])
def test_min_tokens_holds_the_end_back(make_engine: MakeEngine, stops: tuple[int, ...]) -> None:
    engine = make_engine()
    first = ask(engine, PROMPT, 1).tokens[0]
    answer = ask(engine, PROMPT, 12, stop_token_ids=(first, *stops), min_tokens=5)
    assert len(answer.tokens) >= 5
    assert first not in answer.tokens[:5]
    assert engine.health().ok, engine.health().problems
    assert len(ask(engine, PROMPT, 3).tokens) == 3


def test_the_end_token_and_ignore_eos(make_engine: MakeEngine, texted: ServedModel) -> None:
    engine = make_engine(served=texted)
    ends, goes_on = set(), set()
    for seed in range(12):
        answer = ask(engine, PROMPT, 60, temperature=3.0, seed=seed)
        ends.add(answer.reason)
        assert (answer.reason == "stop") == (answer.tokens[-1] == 5)
        assert answer.last is not None and answer.last.stopped_by is None
        assert 5 not in answer.tokens[:-1]
        ignoring = ask(engine, PROMPT, 60, temperature=3.0, seed=seed, ignore_eos=True)
        goes_on.add(ignoring.reason)
        assert ignoring.tokens[: len(answer.tokens)] == answer.tokens
    assert "stop" in ends and goes_on == {"length"}


def stream_text(engine: Engine, **sampling: object) -> tuple[str, str | None, list[int]]:
    text, tokens, reason = "", [], None
    params = SamplingParams(max_tokens=30, ignore_eos=True, **sampling)
    for chunk in engine.submit(GenerationRequest(PROMPT, params)):
        text += chunk.text
        tokens += chunk.token_ids
        reason = chunk.finish_reason
    return text, reason, tokens


def test_stop_texts(make_engine: MakeEngine, texted: ServedModel) -> None:
    engine = make_engine(served=texted)
    whole, reason, _ = stream_text(engine)
    assert (len(whole), reason) == (30, "length")
    for stop in (whole[4:7], whole[9], whole[20:30]):
        text, reason, tokens = stream_text(engine, stop=(stop, "\N{SNOWMAN}"))
        assert (text, reason) == (whole[: whole.index(stop)], "stop")
        assert len(tokens) == whole.index(stop) + len(stop)
        last = ask(engine, PROMPT, 30, ignore_eos=True, stop=("\N{SNOWMAN}", stop)).last
        assert last is not None and last.stopped_by == stop
    assert stream_text(engine, stop=(whole[25:] + "!",))[:2] == (whole, "length"), "held-back text was lost"


def test_a_stop_text_may_be_part_of_the_answer(make_engine: MakeEngine, texted: ServedModel) -> None:
    engine = make_engine(served=texted)
    whole, _, _ = stream_text(engine)
    text, reason, _ = stream_text(engine, stop=(whole[4:7],), include_stop=True)
    assert (text, reason) == (whole[: whole.index(whole[4:7]) + 3], "stop")


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.7, "seed": 5, "temperature": 0.9},
        {"frequency_penalty": 1.5, "presence_penalty": 0.5},
        {"logit_bias": ((7, 9.0), (11, -20.0)), "min_p": 0.05, "seed": 8, "temperature": 1.2},
    ],
)
def test_options_hold_whatever_runs_beside(make_engine: MakeEngine, options: dict[str, Any]) -> None:
    plain = ask(make_engine(), PROMPT, 24).tokens
    alone = ask(make_engine(), PROMPT, 24, logprobs=2, **options)
    assert alone.tokens != plain, "the option changes nothing: no test"
    crowded = make_engine(sizes=Sizes(device=20, host=40, disk_bytes=0))
    streams = []
    for index in range(12):
        prompt, own = (PROMPT, options) if index == 6 else ([index, *PROMPT[index:]], {})
        params = SamplingParams(max_tokens=24, logprobs=2, **own)
        streams.append(crowded.submit(GenerationRequest(prompt, params)))
    answers = [read(stream) for stream in streams]
    assert answers[6].tokens == alone.tokens
    assert crowded.stats()["preemptions"] > 0, "nobody was preempted: the pool is too large for this test"
    wait_idle(crowded)


def test_a_stop_text_before_min_tokens_is_text(make_engine: MakeEngine, texted: ServedModel) -> None:
    engine = make_engine(served=texted)
    whole, _, _ = stream_text(engine)
    text, _, tokens = stream_text(engine, stop=(whole[2:4],), min_tokens=12)
    assert len(tokens) >= 12
    assert text_of(tokens).startswith(text) and len(text) >= 10, "a stop text that did not stop was cut out"


class PieceDetokenizer:
    def __init__(self, pieces: list[str], rest: str) -> None:
        self.pieces, self.rest = pieces, rest

    def push(self, token_id: int) -> str:
        return self.pieces[token_id]

    def finish(self) -> str:
        return self.rest


ALPHABET = st.text("ab.", max_size=4)


def cut(text: str, stops: list[str]) -> str | None:
    found = [text.find(stop) for stop in stops if stop and stop in text]
    return text[: min(found)] if found else None


@given(st.lists(ALPHABET, max_size=12), ALPHABET, st.lists(ALPHABET, max_size=3))
def test_stopping_text_equals_a_cut_of_the_whole(pieces: list[str], rest: str, stops: list[str]) -> None:
    stopping = StoppingText(PieceDetokenizer(pieces, rest), stops)
    shown = ""
    for index in range(len(pieces)):
        piece, stopped = stopping.push(index)
        shown += piece
        so_far = "".join(pieces[: index + 1])
        due = cut(so_far, stops)
        assert stopped == (due is not None)
        if due is not None:
            assert shown == due
            return
        assert so_far.startswith(shown)
        # Whatever comes, a stop text that has begun is not on show.
        for stop in stops:
            for end in range(1, len(stop)):
                if so_far.endswith(stop[:end]):
                    assert len(shown) <= len(so_far) - end
    whole = "".join(pieces) + rest
    assert shown + stopping.finish() == (whole if cut(whole, stops) is None else cut(whole, stops))
