"""What other clients send, as they sent it (`bodies/`, one file a client and version), is answered in the shape that
they read. The clients themselves are too heavy for the tests; docs/CLIENTS.md shows them at work.

A recorded request that names a `refused` field must get a 400 about that field, in a sentence.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

BODIES = Path(__file__).parent / "bodies"
Json = dict[str, Any]


def recorded() -> list[Any]:
    """Every request of every file, under the client's name."""
    cases = []
    for file in sorted(BODIES.glob("*.json")):
        for request in json.loads(file.read_text("utf-8"))["requests"]:
            cases.append(pytest.param(request, id=f"{file.stem}: {request['what']}"))
    return cases


def events_of(answer: httpx.Response) -> list[Json]:
    """A stream's JSON objects, which `[DONE]` must end. Comment lines are keep-alives, which clients pass over."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    blocks = [block for block in answer.text.split("\n\n") if block and not block.startswith(":")]
    assert blocks.pop() == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


def prompts_of(body: Json) -> int:
    prompt = body.get("prompt")
    return len(prompt) if isinstance(prompt, list) and isinstance(prompt[0], str | list) else 1


def check_usage(body: Json, usage: Json) -> None:
    assert usage["prompt_tokens"] > 0
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert (
        sum(usage["strata"][source] for source in ("device", "host", "disk", "computed"))
        == usage["prompt_tokens"]
    )
    assert usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"]
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    answers = body.get("n") or 1
    if body.get("ignore_eos"):
        assert usage["completion_tokens"] == limit, "a bench client counts on the length that it asked for"
    elif limit:
        assert 0 < usage["completion_tokens"] <= limit * answers


def check_stream(body: Json, events: list[Json], chat: bool) -> None:
    options = body.get("stream_options") or {}
    usage = events.pop()["usage"] if options.get("include_usage") else None
    assert len({event["id"] for event in events}) == 1
    assert {event["object"] for event in events} == {"chat.completion.chunk" if chat else "text_completion"}
    pieces = [event["choices"][0] for event in events]
    texts = [piece["delta"].get("content") if chat else piece["text"] for piece in pieces]
    assert "".join(text or "" for text in texts)
    assert [piece["finish_reason"] is not None for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    if chat:
        assert pieces[0]["delta"]["role"] == "assistant"
    if options.get("continuous_usage_stats"):
        counts = [event["usage"]["completion_tokens"] for event in events]
        assert counts == sorted(counts) and counts[-1] > 0
    if usage is not None:
        check_usage(body, usage)


def check_choice_of_chat(body: Json, choice: Json) -> None:
    assert choice["message"]["role"] == "assistant" and choice["message"]["content"]
    assert choice["finish_reason"] in ("stop", "length")
    if body.get("response_format") and choice["finish_reason"] == "stop":
        assert isinstance(json.loads(choice["message"]["content"]), dict)
    if body.get("logprobs"):
        tokens = choice["logprobs"]["content"]
        assert tokens and all(len(token["top_logprobs"]) == body["top_logprobs"] for token in tokens)
        assert all(
            bytes(token["bytes"]).decode() == token["token"] and token["logprob"] <= 0 for token in tokens
        )


def check_choice_of_completion(body: Json, choice: Json) -> None:
    assert choice["text"] and choice["finish_reason"] in ("stop", "length")
    if body.get("logprobs") and body.get("echo"):
        prompt, columns = body["prompt"][choice["index"]], choice["logprobs"]
        assert len(columns["tokens"]) == len(prompt) + body["max_tokens"]
        assert {len(column) for column in columns.values()} == {len(columns["tokens"])}
        assert columns["token_logprobs"][0] is None and columns["top_logprobs"][0] is None
        for token, value, top in list(zip(*(columns[name] for name in SCORES), strict=True))[1:]:
            assert value <= 0 and top[token] == value and max(top.values()) >= value


SCORES = ("tokens", "token_logprobs", "top_logprobs")


@pytest.mark.parametrize("request_sent", recorded())
def test_a_client_gets_what_it_reads(http: httpx.Client, request_sent: Json) -> None:
    body, path, headers = request_sent["body"], request_sent["path"], request_sent.get("headers", {})
    answer = http.post(path, json=body, headers=headers)
    if "x-request-id" in headers:
        assert answer.headers["x-request-id"] == headers["x-request-id"]
    if "refused" in request_sent:
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", request_sent["refused"])
        assert "leave" in error["message"] or "use another" in error["message"], "the sentence has a remedy"
        return
    assert answer.status_code == 200, answer.text
    chat = path.endswith("/chat/completions")
    if path == "/tokenize":
        assert answer.json()["count"] == len(answer.json()["tokens"]) > 0
        assert (
            http.post("/detokenize", json={"tokens": answer.json()["tokens"]}).json()["prompt"]
            == body["prompt"]
        )
    elif body.get("stream"):
        check_stream(body, events_of(answer), chat)
    else:
        whole = answer.json()
        assert whole["object"] == ("chat.completion" if chat else "text_completion")
        assert [choice["index"] for choice in whole["choices"]] == list(
            range(prompts_of(body) * (body.get("n") or 1))
        )
        for choice in whole["choices"]:
            (check_choice_of_chat if chat else check_choice_of_completion)(body, choice)
        check_usage(body, whole["usage"])


def test_what_clients_ask_beside_answers(http: httpx.Client) -> None:
    """Open WebUI lists the models, aiperf and the bench clients scrape the metrics, guidellm asks whether it is up."""
    models = http.get("/v1/models").json()
    assert models["object"] == "list" and models["data"][0]["id"] and models["data"][0]["object"] == "model"
    assert "# TYPE" in http.get("/metrics").text
    assert http.get("/health").status_code == 200
