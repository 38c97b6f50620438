"""Penalties, bias, bans, grammars and log probabilities against formulas written out token by token."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from strata.engine import SamplingParams
from strata.engine.logit_rules import Row, apply_rules
from strata.engine.logprobs import hidden_logprobs, token_logprobs
from strata.engine.sampler import sample_rows

VOCABULARY = 11
LOGITS = st.lists(st.floats(-8, 8), min_size=VOCABULARY, max_size=VOCABULARY)
TOKENS = st.lists(st.integers(0, VOCABULARY - 1), max_size=20)
BIAS = st.dictionaries(st.integers(0, VOCABULARY - 1), st.floats(-100, 100), max_size=4)
PARAMS = st.builds(
    SamplingParams,
    repetition_penalty=st.sampled_from([1.0, 0.7, 1.3, 2.0]),
    presence_penalty=st.sampled_from([0.0, 0.6, -1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.25, -0.5, 2.0]),
    logit_bias=BIAS.map(lambda bias: tuple(bias.items())),
)


def due(logits: list[float], row: Row) -> list[float]:
    """The rules one token after the other."""
    params, changed = row.params, []
    bias = dict(params.logit_bias)
    for token, score in enumerate(logits):
        if row.allowed is not None:
            score = score if row.allowed[token] else -math.inf
        elif token in row.banned:
            score = -math.inf
        score += bias.get(token, 0.0)
        if token in row.prompt_tokens or token in row.output:
            score = score / params.repetition_penalty if score > 0 else score * params.repetition_penalty
        count = row.output.count(token)
        if count:
            score -= params.presence_penalty + params.frequency_penalty * count
        changed.append(score)
    return changed


@given(LOGITS, PARAMS, TOKENS, TOKENS, st.lists(st.integers(0, VOCABULARY - 1), max_size=5))
def test_rules_are_their_formulas(
    logits: list[float], params: SamplingParams, prompt: list[int], output: list[int], banned: list[int]
) -> None:
    row = Row(params, 0, output, prompt, banned)
    found = torch.tensor(logits, dtype=torch.float64)
    if row.changes_logits:
        apply_rules(found, row)
    assert found.tolist() == pytest.approx(due(logits, row), abs=1e-12)


@given(LOGITS, st.lists(st.booleans(), min_size=VOCABULARY, max_size=VOCABULARY), st.floats(0, 2))
def test_a_grammar_leaves_what_it_allows(
    logits: list[float], allowed: list[bool], temperature: float
) -> None:
    mask = np.array(allowed)
    mask[3] = True
    row = Row(SamplingParams(temperature=temperature, logit_bias=((3, -90.0),)), 4, allowed=mask)
    for position in range(5):
        step = Row(row.params, row.seed, [3] * position, banned=(3,), allowed=mask)
        (sampled,) = sample_rows(torch.tensor([logits], dtype=torch.float64), [step])
        assert mask[sampled.token_id]


def test_a_row_with_no_option_is_left_alone_beside_others() -> None:
    logits = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    best = logits.argmax(-1).tolist()
    rows = [
        Row(SamplingParams()),
        Row(SamplingParams(logit_bias=((best[1], -100.0),))),
        Row(SamplingParams(), banned=(best[2],)),
    ]
    tokens = [each.token_id for each in sample_rows(logits.clone(), rows)]
    assert tokens[0] == best[0] and tokens[1] != best[1] and tokens[2] != best[2]


def test_nothing_left_to_choose_from_is_no_failure() -> None:
    banned = range(VOCABULARY)
    rows = [Row(SamplingParams(temperature=heat), banned=banned) for heat in (0.0, 1.0)]
    tokens = [each.token_id for each in sample_rows(torch.zeros(2, VOCABULARY), rows)]
    assert all(0 <= token < VOCABULARY for token in tokens)


@given(LOGITS, st.floats(0.01, 1), st.floats(0.2, 3), st.integers(0, 1000))
def test_min_p_keeps_tokens_by_their_share_of_the_best(
    logits: list[float], min_p: float, temperature: float, seed: int
) -> None:
    row = Row(SamplingParams(temperature=temperature, min_p=min_p), seed)
    (sampled,) = sample_rows(torch.tensor([logits], dtype=torch.float64), [row])
    share = math.exp((logits[sampled.token_id] - max(logits)) / temperature)
    assert share >= min_p * (1 - 1e-9)


@given(LOGITS, st.integers(0, 5))
def test_logprobs_are_those_before_every_rule(logits: list[float], count: int) -> None:
    params = SamplingParams(temperature=1.5, logprobs=count, logit_bias=((0, 50.0),), presence_penalty=1.0)
    (sampled,) = sample_rows(torch.tensor([logits], dtype=torch.float64), [Row(params, 3, [1, 2])])
    total = math.log(sum(math.exp(score) for score in logits))
    assert sampled.logprob is not None and sampled.logprob.token_id == sampled.token_id
    assert sampled.logprob.logprob == pytest.approx(logits[sampled.token_id] - total, abs=1e-9)
    top = sampled.logprob.top
    assert [value for _, value in top] == pytest.approx(
        sorted(logits, reverse=True)[:count] - np.float64(total)
    )
    for token, value in top:
        assert value == pytest.approx(logits[token] - total, abs=1e-9)


def test_hidden_states_are_projected_a_few_rows_at_a_time() -> None:
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(300, 6, generator=generator, dtype=torch.float64)
    vocabulary = torch.randn(6, VOCABULARY, generator=generator, dtype=torch.float64)
    tokens = torch.randint(0, VOCABULARY, (299,), generator=generator).tolist()
    most = 0

    def project(states: torch.Tensor) -> torch.Tensor:
        nonlocal most
        most = max(most, len(states))
        return states @ vocabulary

    found = hidden_logprobs(project, hidden, tokens, 2)
    whole = token_logprobs(hidden[:299] @ vocabulary, tokens, 2)
    assert most <= 128
    assert [each.token_id for each in found] == tokens
    for one, other in zip(found, whole, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-12)
        assert [token for token, _ in one.top] == [token for token, _ in other.top]


def test_last_bits_do_not_change_a_draw() -> None:
    """What one batch and another differ in: the tail of a flat distribution must not turn on it."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(1, 50_000, generator=generator)
    nudged = logits * (1 + 1e-6 * torch.randn(1, 50_000, generator=generator))
    rows = [Row(SamplingParams(temperature=1.5), 5, [0] * place) for place in range(50)]
    one, other = ([sample_rows(each.clone(), [row])[0].token_id for row in rows] for each in (logits, nudged))
    assert one == other and len(set(one)) > 40


@pytest.mark.parametrize("seed", range(3))
def test_draws_follow_the_softmax(seed: int) -> None:
    logits = torch.tensor([[0.3, 1.0, 2.0, -1.0, -torch.inf]], dtype=torch.float64)
    draws = 3000
    rows = [Row(SamplingParams(temperature=1.0), seed, [0] * place) for place in range(draws)]
    found = np.bincount([sample_rows(logits.clone(), [row])[0].token_id for row in rows], minlength=5) / draws
    share = logits[0].softmax(-1).numpy()
    assert (np.abs(found - share) <= 5 * np.sqrt(share * (1 - share) / draws)).all()
