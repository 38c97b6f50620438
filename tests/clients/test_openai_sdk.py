"""The `openai` package against the default model: every call that a program of its makes, and its exceptions."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import httpx
import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

PROMPT = "The capital of France is"
MESSAGES: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is two plus two?"},
]
TOOLS: list[ChatCompletionToolParam] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather in a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


@pytest.fixture(scope="module")
def client(default_server_url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{default_server_url}/v1", api_key="none", timeout=120, max_retries=0) as client:
        yield client


def test_a_completion_is_the_same_whole_and_streamed(client: OpenAI) -> None:
    whole = client.completions.create(model="default", prompt=PROMPT, max_tokens=6, temperature=0)
    assert "Paris" in whole.choices[0].text
    stream = client.completions.create(
        model="default", prompt=PROMPT, max_tokens=6, temperature=0, stream=True
    )
    pieces = [chunk.choices[0] for chunk in stream]
    assert "".join(piece.text for piece in pieces) == whole.choices[0].text
    assert pieces[-1].finish_reason == whole.choices[0].finish_reason == "length"


def test_a_chat_is_the_same_whole_and_streamed_with_one_last_usage_chunk(client: OpenAI) -> None:
    whole = client.chat.completions.create(model="default", messages=MESSAGES, max_tokens=8, temperature=0)
    stream = client.chat.completions.create(
        model="default",
        messages=MESSAGES,
        max_completion_tokens=8,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    *pieces, last = stream
    assert (
        "".join(piece.choices[0].delta.content or "" for piece in pieces) == whole.choices[0].message.content
    )
    assert all(piece.usage is None for piece in pieces)
    assert last.choices == [] and last.usage is not None and whole.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (
        whole.usage.prompt_tokens,
        whole.usage.completion_tokens,
    )
    assert last.usage.model_dump()["strata"]["device"] > 0, "the second time it comes from the cache"


def test_several_answers_with_a_seed_are_the_same_again(client: OpenAI) -> None:
    def answers() -> list[str | None]:
        chat = client.chat.completions.create(
            model="default",
            messages=MESSAGES,
            max_tokens=6,
            temperature=1.5,
            n=3,
            seed=5,
            extra_body={"top_k": 20},
        )
        assert [choice.index for choice in chat.choices] == [0, 1, 2]
        return [choice.message.content for choice in chat.choices]

    first = answers()
    assert first == answers()
    assert len(set(first)) > 1, "three draws are three draws"


def test_log_probabilities_of_the_greedy_answer(client: OpenAI) -> None:
    chat = client.chat.completions.create(
        model="default", messages=MESSAGES, max_tokens=4, temperature=0, logprobs=True, top_logprobs=3
    )
    logprobs = chat.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert "".join(token.token for token in logprobs.content) == chat.choices[0].message.content
    for token in logprobs.content:
        assert [token.token, token.logprob] == [token.top_logprobs[0].token, token.top_logprobs[0].logprob]
    completion = client.completions.create(
        model="default", prompt=PROMPT, max_tokens=1, temperature=0, logprobs=1, echo=True
    )
    columns = completion.choices[0].logprobs
    assert columns is not None and columns.tokens is not None and columns.token_logprobs is not None
    assert "".join(columns.tokens) == completion.choices[0].text
    assert columns.token_logprobs[0] is None  # the SDK's types do not know it, its users do


def test_models(client: OpenAI) -> None:
    model, default = client.models.list().data
    assert default.id == "default"
    assert client.models.retrieve(model.id).id == model.id
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")


def test_errors_are_the_sdks_own_exceptions(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="another", prompt=PROMPT)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="default", prompt="word " * 9000)
    assert (long.value.code, long.value.param) == ("context_length_exceeded", "prompt")
    with pytest.raises(openai.BadRequestError) as hot:
        client.completions.create(model="default", prompt=PROMPT, temperature=-1)
    assert hot.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as empty:
        client.chat.completions.create(model="default", messages=[])
    assert empty.value.param == "messages"


def test_tools_that_this_models_template_cannot_show_are_refused_in_a_sentence(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="no place for tools") as tools:
        client.chat.completions.create(model="default", messages=MESSAGES, tools=TOOLS)
    assert tools.value.param == "tools"
    kept = client.chat.completions.create(
        model="default", messages=MESSAGES, tools=TOOLS, tool_choice="none", max_tokens=2
    )
    assert kept.choices[0].message.content


def test_an_answer_has_the_form_that_was_asked_for(client: OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"sum": {"enum": [3, 4]}},
        "required": ["sum"],
        "additionalProperties": False,
    }
    shaped = client.chat.completions.create(
        model="default",
        messages=MESSAGES,
        max_tokens=40,
        temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
    )
    assert json.loads(shaped.choices[0].message.content or "")["sum"] in (3, 4)
    plain = client.chat.completions.create(
        model="default", messages=MESSAGES, max_tokens=2, response_format={"type": "text"}
    )
    assert plain.choices[0].message.content


def test_the_request_id_goes_there_and_back(client: OpenAI) -> None:
    raw = client.completions.with_raw_response.create(
        model="default", prompt=PROMPT, max_tokens=1, extra_headers={"x-request-id": "mine-7"}
    )
    assert raw.request_id == raw.headers["x-request-id"] == "mine-7"
    answer = raw.parse()
    assert answer.id.endswith("mine-7") and answer.choices[0].text
    unnamed = client.completions.with_raw_response.create(model="default", prompt=PROMPT, max_tokens=1)
    assert unnamed.request_id


def test_a_client_that_gives_up_leaves_nothing_running(client: OpenAI, http: httpx.Client) -> None:
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.3).completions.create(
            model="default", prompt="Once upon a time", max_tokens=4000, extra_body={"ignore_eos": True}
        )
    stream = client.chat.completions.create(
        model="default", messages=MESSAGES, max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
    )
    assert next(iter(stream)).choices
    stream.close()
    deadline = time.monotonic() + 30
    while (stats := http.get("/cache").json()["stats"])["running"] + stats["waiting"] > 0:
        assert time.monotonic() < deadline, stats
        time.sleep(0.1)
    assert stats["device_pinned_pages"] == 0
