"""Every refusal has OpenAI's shape, the right status, and says what to change."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest
from fake_engine import Control
from running_server import RunningServer

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "words"),
    [
        ("/v1/completions", {"prompt": ""}, 400, "prompt", "empty"),
        ("/v1/completions", {"prompt": []}, 400, "prompt", "empty"),
        ("/v1/completions", {"prompt": ["a", ""]}, 400, "prompt", "empty"),
        ("/v1/completions", {}, 400, "prompt", "prompt: Field required"),
        ("/v1/completions", {"prompt": {"a": 1}}, 400, "prompt", "prompt"),
        ("/v1/completions", {"prompt": [1, "a"]}, 400, "prompt", "integer"),
        ("/v1/completions", {"prompt": [-1]}, 400, "prompt", "greater than or equal to 0"),
        ("/v1/completions", {"prompt": [0x110000]}, 400, None, "1114112"),
        ("/v1/completions", {"prompt": "x" * 4096}, 400, "prompt", "4096 tokens"),
        (
            "/v1/completions",
            {"prompt": "x" * 4000, "max_tokens": 97},
            400,
            "max_tokens",
            "lower max_tokens to 96",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x" * 9000}]},
            400,
            "messages",
            "4096",
        ),
        ("/v1/completions", {"prompt": "x", "n": 2}, 400, "n", "n=2 is not supported"),
        ("/v1/completions", {"prompt": "x", "echo": True}, 400, "echo", "not supported"),
        ("/v1/completions", {"prompt": "x", "logprobs": 0}, 400, "logprobs", "not supported"),
        ("/v1/completions", {"prompt": "x", "logit_bias": {"5": 1}}, 400, "logit_bias", "not supported"),
        ("/v1/completions", {"prompt": "x", "frequency_penalty": 0.5}, 400, "frequency_penalty", "send 0"),
        ("/v1/chat/completions", {**CHAT, "tools": [{"type": "function"}]}, 400, "tools", "not supported"),
        ("/v1/completions", {"prompt": "x", "temperature": -1}, 400, "temperature", "greater than or equal"),
        ("/v1/completions", {"prompt": "x", "top_p": 0}, 400, "top_p", "greater than 0"),
        (
            "/v1/completions",
            {"prompt": "x", "max_tokens": 0},
            400,
            "max_tokens",
            "greater than or equal to 1",
        ),
        ("/v1/completions", {"prompt": "x", "stop": ["a", ""]}, 400, "stop", "empty text"),
        ("/v1/completions", {"prompt": "x", "min_tokens": 17}, 400, "min_tokens", "min_tokens 17 is more"),
        ("/v1/completions", {"prompt": "x", "model": "gpt-9"}, 404, "model", "'gpt-9' is not served here"),
        ("/v1/chat/completions", {"messages": []}, 400, "messages", "at least 1"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "messages",
            "'image_url' is not supported",
        ),
        ("/cache/demote", {"tiers": ["tape"]}, 400, "tiers", "device, host, disk"),
        ("/cache/demote", {"tiers": []}, 400, "tiers", "at least 1"),
        ("/v1/nothing", {}, 404, None, "/v1/nothing: Not Found"),
    ],
)
def test_refusals(
    served: RunningServer, path: str, body: dict[str, Any], status: int, param: str | None, words: str
) -> None:
    answer = served.http.post(path, json=body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert words in error["message"]
    assert served.engine.streams == []


def test_an_overlong_prompt_names_both_numbers(served: RunningServer) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        served.openai.completions.create(model="default", prompt="x" * 5000)
    assert caught.value.code == "context_length_exceeded"
    assert "5000" in str(caught.value) and "4096" in str(caught.value)


def test_a_prompt_of_megabytes_is_counted_not_cut(served: RunningServer) -> None:
    for prompt in ("x" * 3_000_000, [5] * 500_000):
        answer = served.http.post("/v1/completions", json={"prompt": prompt})
        assert answer.status_code == 400
        assert f"the prompt has {len(prompt)} tokens" in answer.json()["error"]["message"]


@pytest.mark.parametrize("content", [b'{"prompt": ', b"\xff\xfe", b'{"prompt": "x"} trailing'])
def test_bad_json(served: RunningServer, content: bytes) -> None:
    answer = served.http.post(
        "/v1/completions", content=content, headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 400, answer.text
    assert "JSON" in answer.json()["error"]["message"]


@pytest.mark.parametrize("content", [b"[1, 2]", b'"text"', b""])
def test_a_body_that_is_no_object(served: RunningServer, content: bytes) -> None:
    answer = served.http.post(
        "/v1/completions", content=content, headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 400
    assert "JSON object" in answer.json()["error"]["message"]


def test_a_full_queue_is_429_with_retry_after(served: RunningServer) -> None:
    served.engine.control = Control(full=True)
    answer = served.http.post("/v1/completions", json={"prompt": "x"})
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.json()["error"]["code"] == "queue_full"
    with pytest.raises(openai.RateLimitError):
        served.openai.completions.create(model="default", prompt="x")


def test_a_queue_full_at_the_second_prompt_aborts_the_first(
    served: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = served.engine.submit

    def submit_once(request: Any) -> Any:
        stream = first(request)
        served.engine.control = Control(full=True)
        return stream

    monkeypatch.setattr(served.engine, "submit", submit_once)
    served.engine.control = Control(hold=True)
    assert served.http.post("/v1/completions", json={"prompt": ["a", "b"]}).status_code == 429
    assert [stream.aborted.is_set() for stream in served.engine.streams] == [True]


def test_a_dead_engine_is_503(served: RunningServer) -> None:
    served.engine.control = Control(dead=True)
    answer = served.http.post("/v1/completions", json={"prompt": "x"})
    assert answer.status_code == 503
    assert "the engine thread ended" in answer.json()["error"]["message"]
    assert "retry-after" in answer.headers
    health = served.http.get("/health")
    assert health.status_code == 503
    assert health.json() == {"status": "dead", "ready": False, "problems": ["the engine thread ended"]}


def test_an_engine_error_in_a_stream_becomes_an_event(served: RunningServer) -> None:
    served.engine.control = Control(fail_after=1)
    answer = served.http.post("/v1/completions", json={"prompt": "x", "stream": True})
    *_, error, done = [line for line in answer.text.split("\n\n") if line]
    assert json.loads(error[6:])["error"]["type"] == "server_error"
    assert done == "data: [DONE]"
    whole = served.http.post("/v1/completions", json={"prompt": "x"})
    assert whole.status_code == 503 and "fake disk" in whole.json()["error"]["message"]
    with pytest.raises(openai.APIError, match="fake disk"):
        list(served.openai.completions.create(model="default", prompt="x", stream=True))


def test_half_an_answer_never_looks_whole(served: RunningServer) -> None:
    served.engine.control = Control(finish_reason="abort")
    assert served.http.post("/v1/completions", json={"prompt": "x"}).status_code == 503
    with pytest.raises(openai.APIError, match="before its answer was complete"):
        list(served.openai.completions.create(model="default", prompt="x", stream=True))


def test_a_defect_is_a_500_without_details(served: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def submit(request: Any) -> Any:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(served.engine, "submit", submit)
    answer = served.http.post("/v1/completions", json={"prompt": "x"})
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"
    assert "secret" not in answer.text


class TestKey:
    """With an API key."""

    def test_wrong_or_missing_keys_are_refused(self, serve: Callable[..., RunningServer]) -> None:
        served = serve(api_key="s3cret")
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "s3cret"}):
            for method, path in (("POST", "/v1/completions"), ("POST", "/cache/flush"), ("GET", "/metrics")):
                answer = served.http.request(method, path, json={"prompt": "x"}, headers=headers)
                assert answer.status_code == 401
                assert answer.headers["www-authenticate"] == "Bearer"
                assert answer.json()["error"]["code"] == "invalid_api_key"
        assert served.engine.streams == [] and served.engine.calls == []

    def test_the_right_key_is_let_in_and_health_is_open(self, serve: Callable[..., RunningServer]) -> None:
        served = serve(api_key="s3cret")
        answer = served.openai.completions.create(model="default", prompt="x")
        assert answer.choices[0].text == "Hello, world"
        assert served.http.get("/health").status_code == 200
