"""Log probabilities of prompts and answers are those of the whole sequence computed at once, and asking for them leaves
the cache as it was."""

from __future__ import annotations

import pytest
import torch
from engine_harness import MakeEngine, Sizes, ask, read, wait_idle

from strata.engine import Chunk, Engine, GenerationRequest, SamplingParams, ServedModel
from strata.errors import RequestError

PROMPT = [(5 * place + 1) % 97 for place in range(61)]


def scored(engine: Engine, prompt: list[int], most: int = 4, count: int = 2) -> list[Chunk]:
    params = SamplingParams(max_tokens=most, logprobs=count, prompt_logprobs=count)
    return list(engine.submit(GenerationRequest(prompt, params)))


def assert_right(served: ServedModel, prompt: list[int], chunks: list[Chunk], count: int = 2) -> None:
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    logprobs = served.model.reference_forward([*prompt, *tokens]).log_softmax(-1)
    assert not any(chunk.prompt_logprobs for chunk in chunks[1:])
    first, *rest = chunks[0].prompt_logprobs
    assert first is None
    entries = [*rest, *(each for chunk in chunks for each in chunk.logprobs)]
    assert [each.token_id for each in entries if each] == [*prompt[1:], *tokens]
    for row, each in zip(logprobs, entries, strict=False):
        assert each is not None
        assert each.logprob == pytest.approx(float(row[each.token_id]), abs=1e-9)
        top = row.topk(count)
        assert [token for token, _ in each.top] == top.indices.tolist()
        assert [value for _, value in each.top] == pytest.approx(top.values.tolist(), abs=1e-9)


@pytest.mark.parametrize("batch", [16, 512])
def test_they_are_those_of_the_whole_sequence(
    make_engine: MakeEngine, served: ServedModel, batch: int
) -> None:
    engine = make_engine(batch_tokens=batch)
    ask(engine, PROMPT, 4)
    pages = engine.stats()["device_resident_pages"]
    for _ in range(2):
        chunks = scored(engine, PROMPT)
        assert_right(served, PROMPT, chunks)
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.sources.computed == len(PROMPT), "a cached page has no logits"
    wait_idle(engine)
    assert engine.stats()["device_resident_pages"] == pages, "what was computed for logprobs was kept"
    again = ask(engine, PROMPT, 4)
    assert again.sources[0] == 60, "the pages that were there before were lost"


def test_under_pressure(make_engine: MakeEngine, served: ServedModel) -> None:
    engine = make_engine(sizes=Sizes(device=26, host=40, disk_bytes=0), batch_tokens=24)
    prompts = [[index, *PROMPT[: 9 + index]] for index in range(8)]
    params = [
        SamplingParams(max_tokens=40, logprobs=2, prompt_logprobs=2 if index % 2 else None)
        for index in range(8)
    ]
    streams = [
        engine.submit(GenerationRequest(prompt, each)) for prompt, each in zip(prompts, params, strict=True)
    ]
    for index, stream in enumerate(streams):
        chunks = list(stream)
        if index % 2:
            assert_right(served, prompts[index], chunks)
        else:
            assert not chunks[0].prompt_logprobs and chunks[0].logprobs
    assert engine.stats()["preemptions"] > 0, "nobody was preempted: the pool is too large for this test"
    wait_idle(engine)


def test_they_are_bounded(make_engine: MakeEngine) -> None:
    params = SamplingParams(max_tokens=1, prompt_logprobs=20)
    with pytest.raises(RequestError, match="more than the 524288 log probabilities"):
        make_engine().submit(GenerationRequest([1] * 25_000, params))


def test_a_prompt_of_one_token_has_nothing_to_predict(make_engine: MakeEngine) -> None:
    chunks = scored(make_engine(), [3], 1)
    assert chunks[0].prompt_logprobs == (None,)


def test_an_aborted_request_is_forgotten(make_engine: MakeEngine) -> None:
    engine = make_engine(batch_tokens=16)
    params = SamplingParams(max_tokens=200, prompt_logprobs=0)
    assert read(engine.submit(GenerationRequest(PROMPT, params)), abort_after=3).reason == "abort"
    wait_idle(engine)


def test_memory_is_bounded_by_rows(
    make_engine: MakeEngine, served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, most = make_engine(batch_tokens=1024), 0
    project = served.model.project_to_vocabulary

    def watched(hidden: torch.Tensor) -> torch.Tensor:
        nonlocal most
        most = max(most, len(hidden))
        return project(hidden)

    monkeypatch.setattr(served.model, "project_to_vocabulary", watched)
    scored(engine, (PROMPT * 6)[:300], 1)
    assert 1 < most <= 128
