"""Every refusal has OpenAI's shape, the right status, and says what to change."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest
from fake_engine import Control
from pydantic import BaseModel, ValidationError
from running_server import RunningServer

from strata.engine.context import ContextBounds
from strata.serve.chat import ChatBody
from strata.serve.protocol import CompletionBody, DemoteBody

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
        ("/v1/completions", {"prompt": [-1]}, 400, "prompt", "prompt.0: Input should be greater"),
        ("/v1/completions", {"prompt": [[1], [2, "a"]]}, 400, "prompt", "prompt.1.1: Input should be"),
        ("/v1/completions", {"prompt": [0x110000]}, 400, "prompt", "1114112"),
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
        ("/v1/completions", {"prompt": "x", "n": 0}, 400, "n", "greater than or equal to 1"),
        ("/v1/completions", {"prompt": "x", "n": 2, "best_of": 3}, 400, "best_of", "equal to n"),
        ("/v1/completions", {"prompt": "x", "suffix": "y"}, 400, "suffix", 'send ""'),
        ("/v1/completions", {"prompt": "x", "logprobs": 21}, 400, "logprobs", "less than or equal to 20"),
        ("/v1/completions", {"prompt": "x", "logit_bias": {"5": 101}}, 400, "logit_bias", "equal to 100"),
        (
            "/v1/completions",
            {"prompt": "x", "logit_bias": {"a": 1}},
            400,
            "logit_bias",
            "logit_bias.a: Input",
        ),
        (
            "/v1/completions",
            {"prompt": "x", "frequency_penalty": 2.5},
            400,
            "frequency_penalty",
            "equal to 2",
        ),
        (
            "/v1/completions",
            {"prompt": "x", "repetition_penalty": 0},
            400,
            "repetition_penalty",
            "equal to 0.01",
        ),
        ("/v1/completions", {"prompt": "x", "repetition_penalty": 101}, 400, "repetition_penalty", "to 100"),
        (
            "/v1/completions",
            {"prompt": "x", "stop": ["x"] * 65},
            400,
            "stop",
            "stop: holds 65 texts; at most 64",
        ),
        (
            "/v1/completions",
            {"prompt": "x", "stop": [1]},
            400,
            "stop",
            "stop.0: Input should be a valid string",
        ),
        ("/v1/completions", {"prompt": "x", "stop": "x" * 1001}, 400, "stop", "more than 1000"),
        ("/v1/completions", {"prompt": "x", "cache_salt": "x" * 1025}, 400, "cache_salt", "at most 1024"),
        (
            "/v1/completions",
            {"prompt": "x", "logit_bias": dict.fromkeys(range(1025), "bad")},
            400,
            "logit_bias",
            "names 1025 tokens",
        ),
        *(
            ("/v1/completions", {"prompt": "x", name: int("9" * 4000)}, 400, name, "less than")
            for name in ("max_tokens", "max_completion_tokens", "min_tokens", "top_k", "priority")
        ),
        (
            "/v1/chat/completions",
            {**CHAT, "chat_template_kwargs": {"self": 1}},
            400,
            "chat_template_kwargs",
            "self",
        ),
        ("/v1/completions", {"prompt": "x", "min_p": 1.1}, 400, "min_p", "less than or equal to 1"),
        ("/v1/completions", {"prompt": "x", "use_beam_search": True}, 400, "use_beam_search", "send false"),
        ("/v1/completions", {"prompt": "x", "allowed_token_ids": [1]}, 400, "allowed_token_ids", "send null"),
        ("/v1/completions", {"prompt": [2**40]}, 400, "prompt", "less than"),
        ("/v1/chat/completions", {**CHAT, "top_logprobs": 2}, 400, "top_logprobs", "needs logprobs"),
        ("/v1/chat/completions", {**CHAT, "functions": [{}]}, 400, "functions", "send []"),
        ("/v1/chat/completions", {**CHAT, "tool_choice": "required"}, 400, "tool_choice", "'auto' or 'none'"),
        (
            "/v1/chat/completions",
            {**CHAT, "tools": [{}]},
            400,
            "tools",
            'tools.0: a tool is {"type": "function"',
        ),
        ("/tokenize", {**CHAT, "tools": [{"function": {"name": 1}}]}, 400, "tools", "a tool is"),
        (
            "/v1/chat/completions",
            {**CHAT, "chat_template_kwargs": {"tools": []}},
            400,
            "chat_template_kwargs",
            "names tools",
        ),
        (
            "/v1/chat/completions",
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}
                ]
            },
            400,
            "messages",
            "no JSON",
        ),
        ("/tokenize", {}, 400, "prompt", "prompt: Field required"),
        ("/tokenize", {"text": "x"}, 400, "prompt", "prompt: Field required"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{}]}]},
            400,
            "messages",
            "0.content.0.type: Field",
        ),
        ("/tokenize", {"messages": []}, 400, "messages", "at least 1"),
        ("/detokenize", {"tokens": [1, 0x110000]}, 400, "tokens", "token id 1114112 is no token's"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens", "greater than or equal to 0"),
        ("/detokenize", {"tokens": [1], "model": "gpt-9"}, 404, "model", "not served"),
        ("/v1/completions", {"prompt": "x", "temperature": -1}, 400, "temperature", "greater than or equal"),
        ("/v1/completions", {"prompt": "x", "top_p": 0}, 400, "top_p", "greater than 0"),
        (
            "/v1/completions",
            {"prompt": "x", "max_tokens": 0},
            400,
            "max_tokens",
            "at least one token, or set echo",
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
        ("/v1/nothing", {}, 404, None, "POST /v1/nothing is not served here; /openapi.json lists what is"),
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


def test_a_model_without_tools_says_so(served: RunningServer) -> None:
    served.engine.tokenizer.template_takes_tools = False
    body = {**CHAT, "tools": [{"type": "function", "function": {"name": "f"}}]}
    answer = served.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert "no place for tools" in answer.json()["error"]["message"]
    assert served.http.post("/v1/chat/completions", json={**body, "tool_choice": "none"}).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "x"}, "prompt"),
        ("/v1/chat/completions", CHAT, None),
        ("/tokenize", {"prompt": "x"}, "prompt"),
        ("/tokenize", CHAT, None),
        ("/detokenize", {"tokens": [1]}, None),
        ("/tokenizer_info", None, None),
    ],
)
def test_a_model_without_tokenizer_takes_token_ids_alone(
    served: RunningServer, path: str, body: dict[str, Any] | None, param: str | None
) -> None:
    served.engine.tokenizer = None
    answer = served.http.request("GET" if body is None else "POST", path, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert "this model has no tokenizer: send token ids" in error["message"] and error["param"] == param
    ids = {"prompt": [72, 105], "echo": True, "logprobs": 0}
    choice = served.http.post("/v1/completions", json=ids).json()["choices"][0]
    assert choice["text"] == "Hello, world" and choice["logprobs"]["tokens"][0] == "token_id:72"


def test_a_method_that_a_route_does_not_have(served: RunningServer) -> None:
    answer = served.http.get("/v1/completions")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert "use POST" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "content",
    [
        b'{"prompt": "x", "model": "\\ud800"}',
        b'{"prompt": "x", "suffix": "\\ud800"}',
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "presence_penalty": NaN}',
        b'{"prompt": "x", "logit_bias": {"3": Infinity}}',
        b'{"prompt": "x", "max_tokens": 1e400}',
        b'{"prompt": "x", "logit_bias": {"\\ud800": 1}}',
        b'{"prompt": ' + b"[" * 100_000 + b"}",
    ],
)
def test_bytes_that_mean_nothing_are_no_defect(served: RunningServer, content: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    answer = served.http.post("/v1/completions", content=content, headers=headers)
    assert 400 <= answer.status_code < 500, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("body", "adapter"),
    [
        ({"prompt": "x", "stop": [1] * 60}, CompletionBody),
        ({"prompt": "x", "stop_token_ids": ["x"] * 99}, CompletionBody),
        ({"prompt": ["x", *[1] * 99]}, CompletionBody),
        ({"prompt": ["x"] * 99, "guided_choice": [1] * 99}, CompletionBody),
        ({"prompt": [[1], *["x"] * 99]}, CompletionBody),
        ({"prompt": "x", "structured_outputs": {"choice": [1] * 99}}, CompletionBody),
        ({"messages": [1] * 99}, ChatBody),
        ({"messages": [{"role": "user", "content": [1] * 99}]}, ChatBody),
        ({"messages": [{"role": "user", "tool_calls": [1] * 99}]}, ChatBody),
        ({"messages": [{"role": "user"}], "tools": [1] * 99}, ChatBody),
        ({"tiers": [1] * 99}, DemoteBody),
    ],
)
def test_only_the_first_of_many_faults_is_looked_at(body: dict[str, Any], adapter: type[BaseModel]) -> None:
    with pytest.raises(ValidationError) as caught:
        adapter.model_validate(body)
    assert caught.value.error_count() <= 2  # one for each form that the field may have


def test_an_overlong_prompt_names_both_numbers(served: RunningServer) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        served.openai.completions.create(model="default", prompt="x" * 5000)
    assert caught.value.code == "context_length_exceeded"
    assert "5000" in str(caught.value) and "4096" in str(caught.value)


def test_a_context_that_memory_bounds_is_not_blamed_on_the_model(served: RunningServer) -> None:
    served.engine.context = ContextBounds(model=8192, device=2272, whole_bytes=(377 << 20) + 1)
    for prompt, max_tokens in (("x" * 5000, 1), ("x" * 2000, 1000), ("x" * 3_000_000, 1)):
        answer = served.http.post("/v1/completions", json={"prompt": prompt, "max_tokens": max_tokens})
        message = answer.json()["error"]["message"]
        assert answer.status_code == 400
        assert "the context of 2272 tokens that --device-memory leaves of the model's 8192" in message
        assert message.endswith("or serve with --device-memory 378MiB"), "rounded up, so that it is enough"


def test_a_context_that_is_bounded_by_choice_says_so(served: RunningServer) -> None:
    served.engine.context = ContextBounds(model=8192, device=9000, whole_bytes=1, chosen=4000)
    answer = served.http.post("/v1/completions", json={"prompt": "x" * 5000}).json()["error"]["message"]
    assert "the context of 4000 tokens that --max-model-len sets (the model's own: 8192)" in answer
    assert answer.endswith("shorten the prompt, or serve with a larger --max-model-len")
    assert served.http.get("/v1/models").json()["data"][0]["max_model_len"] == 4000
    served.engine.context = ContextBounds(model=8192, device=2272, whole_bytes=1 << 20, chosen=4000)
    answer = served.http.post("/v1/completions", json={"prompt": "x" * 5000}).json()["error"]["message"]
    assert "2272 tokens that --device-memory leaves of the 4000 of --max-model-len" in answer
    served.engine.context = ContextBounds(model=8192, device=9000, whole_bytes=1, chosen=8192)
    answer = served.http.post("/v1/completions", json={"prompt": "x" * 8192}).json()["error"]["message"]
    assert "the model's context of 8192 tokens" in answer and answer.endswith("shorten the prompt")


def test_a_prompt_of_megabytes_is_refused_not_cut(served: RunningServer) -> None:
    for prompt, words in (
        ("x" * 120_000, "the prompt has 120000 tokens"),
        ("x" * 3_000_000, "first 65,536 of 3,000,000 characters alone have 65536 tokens"),
        ([5] * 500_000, "the prompt has 500000 tokens"),
    ):
        served.engine.tokenizer.encoded = 0
        answer = served.http.post("/v1/completions", json={"prompt": prompt})
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"
        assert words in answer.json()["error"]["message"]
        assert served.engine.tokenizer.encoded <= 120_000, "the whole of it was tokenised"
    for body in ({"prompt": "x" * 3_000_000}, {"messages": [{"role": "user", "content": "x" * 3_000_000}]}):
        served.engine.tokenizer.encoded = 0
        assert served.http.post("/tokenize", json=body).status_code == 400
        assert served.engine.tokenizer.encoded <= 120_000, "the whole of it was tokenised"


def test_a_long_text_of_few_tokens_is_still_answered(
    served: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(text: str, add_special_tokens: bool = True) -> list[int]:
        return [5] * (len(text) // 100)

    monkeypatch.setattr(served.engine.tokenizer, "encode", encode)
    answer = served.http.post("/v1/completions", json={"prompt": "x" * 200_000})
    assert answer.json()["usage"]["prompt_tokens"] == 2000


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
    assert answer.headers["x-request-id"]
    counted = 'strata_http_requests_total{route="/v1/completions",status="500"} 1.0'
    # The server closes the connection on which a defect came, and says so.
    assert answer.headers["connection"] == "close"
    assert counted in served.http.get("/metrics").text


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
