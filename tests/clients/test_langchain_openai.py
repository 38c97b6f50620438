"""The `langchain-openai` package against the default model: what a LangChain program calls, and what is refused."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

MESSAGES = [("system", "Be brief."), ("human", "What is two plus two?")]


class City(BaseModel):
    """What a structured answer is read into."""

    name: str
    country: str


@pytest.fixture(scope="module")
def settings(default_server_url: str) -> dict[str, Any]:
    return {
        "base_url": f"{default_server_url}/v1",
        "api_key": "none",
        "model": "default",
        "temperature": 0,
        "max_retries": 0,
        "timeout": 120,
    }


def test_a_chat_is_the_same_whole_streamed_and_in_a_batch(settings: dict[str, Any]) -> None:
    llm = ChatOpenAI(**settings, max_tokens=8, stream_usage=True)
    whole = llm.invoke(MESSAGES)
    pieces = list(llm.stream(MESSAGES))
    assert whole.content and "".join(str(piece.content) for piece in pieces) == whole.content
    (usage,) = [piece.usage_metadata for piece in pieces if piece.usage_metadata]
    assert usage["output_tokens"] == 8 and usage["input_token_details"]["cache_read"] > 0
    assert [answer.content for answer in llm.batch([MESSAGES, MESSAGES])] == [whole.content] * 2


def test_a_completion(settings: dict[str, Any]) -> None:
    assert "Paris" in OpenAI(**settings, max_tokens=4).invoke("The capital of France is")


def test_log_probabilities_and_several_answers(settings: dict[str, Any]) -> None:
    answer = ChatOpenAI(**settings, max_tokens=4, n=2).bind(logprobs=True, top_logprobs=2).invoke(MESSAGES)
    tokens = answer.response_metadata["logprobs"]["content"]
    assert "".join(token["token"] for token in tokens) == answer.content
    assert all(len(token["top_logprobs"]) == 2 for token in tokens)


def test_a_structured_answer_is_an_object_of_its_class(settings: dict[str, Any]) -> None:
    llm = ChatOpenAI(**settings, max_tokens=60).with_structured_output(City, method="json_schema")
    assert isinstance(llm.invoke("Paris"), City)


def test_tools_that_this_models_template_cannot_show_are_refused_in_a_sentence(
    settings: dict[str, Any],
) -> None:
    def weather(city: str) -> str:
        """The weather in a city."""
        return city

    with pytest.raises(openai.BadRequestError, match="no place for tools"):
        ChatOpenAI(**settings, max_tokens=8).bind_tools([weather]).invoke("What is the weather in Paris?")
