"""The `litellm` package, by its way to vLLM servers (`hosted_vllm/`), against the default model."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import litellm
import pytest

Complete = Callable[..., Any]


@pytest.fixture(scope="module")
def complete(default_server_url: str) -> Complete:
    """A chat of one message; keywords are litellm's."""
    settings: dict[str, Any] = {
        "model": "hosted_vllm/default",
        "api_base": f"{default_server_url}/v1",
        "messages": [{"role": "user", "content": "Say hello."}],
        "max_tokens": 8,
        "temperature": 0,
        "timeout": 120,
        "num_retries": 0,
    }
    return lambda **more: litellm.completion(**{**settings, **more})


def test_a_chat_is_the_same_whole_and_streamed(complete: Complete) -> None:
    whole = complete()
    assert whole.choices[0].message.content and whole.usage.completion_tokens <= 8
    chunks = list(complete(stream=True, stream_options={"include_usage": True}))
    texts = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(texts) == whole.choices[0].message.content
    usages = [chunk.usage for chunk in chunks if getattr(chunk, "usage", None)]
    assert usages[-1].prompt_tokens == whole.usage.prompt_tokens


def test_a_completion(default_server_url: str) -> None:
    answer = litellm.text_completion(
        model="hosted_vllm/default",
        api_base=f"{default_server_url}/v1",
        prompt="The capital of France is",
        max_tokens=4,
        temperature=0,
    )
    assert "Paris" in answer.choices[0].text


def test_every_sampling_option_arrives(complete: Complete) -> None:
    sampling = {"min_p": 0.05, "top_k": 20, "repetition_penalty": 1.1, "seed": 1, "stop": ["x"]}
    answer = complete(n=2, temperature=1, presence_penalty=0.1, frequency_penalty=0.1, **sampling)
    assert [choice.index for choice in answer.choices] == [0, 1]
    again = complete(n=2, temperature=1, presence_penalty=0.1, frequency_penalty=0.1, **sampling)
    assert [choice.message.content for choice in answer.choices] == [
        choice.message.content for choice in again.choices
    ]


def test_log_probabilities_and_json_mode(complete: Complete) -> None:
    tokens = complete(logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert tokens and all(len(token.top_logprobs) == 2 for token in tokens)
    shaped = complete(response_format={"type": "json_object"}, max_tokens=60).choices[0]
    assert shaped.finish_reason == "length" or isinstance(json.loads(shaped.message.content), dict)


def test_what_is_refused_is_litellms_own_exception(complete: Complete) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    with pytest.raises(litellm.BadRequestError, match="no place for tools"):
        complete(tools=[tool])
    with pytest.raises(litellm.NotFoundError, match="'nothing' is not served here"):
        complete(model="hosted_vllm/nothing")
