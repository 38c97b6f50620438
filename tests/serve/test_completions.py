"""`/v1/completions` and `/v1/chat/completions` over real HTTP: shapes, usage, parameters, many prompts."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from fake_engine import Control
from running_server import RunningServer

from strata.engine.api import SamplingParams, TokenSources


def events_of(text: str) -> list[Any]:
    """The JSON objects of a stream; `[DONE]` as text."""
    data = [line[len("data: ") :] for line in text.split("\n\n") if line]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


def test_completion_whole(served: RunningServer) -> None:
    served.engine.control = Control(sources=TokenSources(device=2, host=1, disk=3, computed=4))
    answer = served.openai.completions.create(model="fake-model", prompt="0123456789")
    assert answer.object == "text_completion"
    assert answer.model == "fake-model"
    assert [(choice.index, choice.text, choice.finish_reason) for choice in answer.choices] == [
        (0, "Hello, world", "stop")
    ]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (
        10,
        12,
        22,
    )
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 6
    strata = answer.usage.model_dump()["strata"]
    sources = {"device": 2, "host": 1, "disk": 3, "computed": 4}
    times = {"ttft_s": 0.25, "queue_s": 0.05, "prefill_s": 0.2, "decode_s": 0.5}
    assert strata == {**sources, **times, "saved_s": 1.5}


def test_completion_streamed_by_the_sdk(served: RunningServer) -> None:
    chunks = list(
        served.openai.completions.create(
            model="default", prompt="Hi", stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == "Hello, world"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None, None, None, "stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None and chunks[-1].usage.prompt_tokens == 2
    assert len({chunk.id for chunk in chunks}) == 1


def test_stream_on_the_wire(served: RunningServer) -> None:
    answer = served.http.post("/v1/completions", json={"prompt": "Hi", "stream": True})
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = events_of(answer.text)
    assert events[-1] == "[DONE]"
    assert all(event["choices"] and "usage" not in event for event in events[:-1])


def test_usage_is_null_until_the_last_chunk(served: RunningServer) -> None:
    body = {"prompt": "Hi", "stream": True, "stream_options": {"include_usage": True}}
    *pieces, usage, done = events_of(served.http.post("/v1/completions", json=body).text)
    assert done == "[DONE]"
    assert [piece["usage"] for piece in pieces] == [None] * len(pieces)
    assert usage["choices"] == [] and usage["usage"]["total_tokens"] == 14


def test_chat_whole(served: RunningServer) -> None:
    served.engine.control = Control(finish_reason="length")
    answer = served.openai.chat.completions.create(
        model="default",
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}]},
        ],
        max_completion_tokens=9,
    )
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == "Hello, world"
    assert answer.choices[0].finish_reason == "length"
    request = served.engine.streams[0].request
    assert (
        served.engine.tokenizer.decode(request.prompt_token_ids)
        == "<system>Be brief.<user>Hi\nthere<assistant>"
    )
    assert request.sampling.max_tokens == 9


def test_chat_streamed_by_the_sdk(served: RunningServer) -> None:
    chunks = list(
        served.openai.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": "Hi"}],
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert [chunk.choices[0].delta.role for chunk in chunks[:-1]] == ["assistant", None, None, None]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "Hello, world"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == [] and chunks[-1].usage is not None


@pytest.mark.parametrize("stream", [False, True])
def test_text_of_many_bytes_arrives_whole(served: RunningServer, stream: bool) -> None:
    pieces = ("Grüße, ", "世界 ", "👩‍👩‍👧", " \u2028 \U0001f9ca")
    served.engine.control = Control(pieces=pieces)
    answer = served.http.post("/v1/completions", json={"prompt": "日本 🗾", "stream": stream})
    assert served.engine.tokenizer.decode(served.engine.streams[0].request.prompt_token_ids) == "日本 🗾"
    if stream:
        text = "".join(event["choices"][0]["text"] for event in events_of(answer.text)[:-1])
    else:
        text = answer.json()["choices"][0]["text"]
    assert text == "".join(pieces)


def test_pieces_without_text_are_not_sent(served: RunningServer) -> None:
    served.engine.control = Control(pieces=("", "a", "", "b"))
    events = events_of(served.http.post("/v1/completions", json={"prompt": "x", "stream": True}).text)
    assert [event["choices"][0]["text"] for event in events[:-1]] == ["a", "b", ""]


@pytest.mark.parametrize("prompt", [["ab", "cde"], [[97, 98], [99, 100, 101]]])
@pytest.mark.parametrize("stream", [False, True])
def test_many_prompts(served: RunningServer, prompt: list[Any], stream: bool) -> None:
    body = {"prompt": prompt, "stream": stream, "stream_options": {"include_usage": True}}
    answer = served.http.post("/v1/completions", json=body)
    assert [list(item.request.prompt_token_ids) for item in served.engine.streams] == [
        [97, 98],
        [99, 100, 101],
    ]
    texts = ["", ""]
    if stream:
        *pieces, last, _ = events_of(answer.text)
        usage = last["usage"]
        for piece in pieces:
            texts[piece["choices"][0]["index"]] += piece["choices"][0]["text"]
    else:
        usage = answer.json()["usage"]
        for choice in answer.json()["choices"]:
            texts[choice["index"]] = choice["text"]
    assert texts == ["Hello, world"] * 2
    assert usage["prompt_tokens"] == 5 and usage["completion_tokens"] == 24
    assert usage["strata"]["computed"] == 5
    assert (usage["strata"]["prefill_s"], usage["strata"]["decode_s"]) == (0.2, 0.5), "each the longest"


@pytest.mark.parametrize("stopped_by", [None, "END", 0])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_what_stopped_an_answer(
    served: RunningServer, path: str, stream: bool, stopped_by: str | int | None
) -> None:
    served.engine.control = Control(stopped_by=stopped_by)
    body = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "stream": stream}
    answer = served.http.post(path, json=body)
    *pieces, last = events_of(answer.text)[:-1] if stream else [answer.json()]
    assert [piece["choices"][0]["stop_reason"] for piece in pieces] == [None] * len(pieces)
    assert last["choices"][0]["stop_reason"] == stopped_by
    assert last["system_fingerprint"] is None
    if "message" in last["choices"][0]:
        assert last["choices"][0]["message"]["refusal"] is None


def test_token_ids_are_not_tokenised(served: RunningServer) -> None:
    served.http.post("/v1/completions", json={"prompt": [5, 6, 7]}).raise_for_status()
    assert list(served.engine.streams[0].request.prompt_token_ids) == [5, 6, 7]


def test_defaults_are_openais(served: RunningServer) -> None:
    served.http.post("/v1/completions", json={"prompt": "x"}).raise_for_status()
    served.http.post(
        "/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]}
    ).raise_for_status()
    completion, chat = (stream.request for stream in served.engine.streams)
    assert completion.sampling == SamplingParams(max_tokens=16, temperature=1.0)
    assert chat.sampling.max_tokens == served.engine.max_context - len(chat.prompt_token_ids)


def test_what_a_request_leaves_out_is_as_the_models_makers_want_it(served: RunningServer) -> None:
    served.engine.sampling_defaults = {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "min_p": 0.1,
        "repetition_penalty": 1.05,
        "max_tokens": 100,
    }
    chat = {"messages": [{"role": "user", "content": "x"}]}
    own = {"temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1, "max_tokens": 200}
    for path, body in (
        ("completions", {"prompt": "x", "temperature": None}),
        ("chat/completions", {**chat, "top_k": None}),
        ("chat/completions", {**chat, **own}),
    ):
        served.http.post(f"/v1/{path}", json=body).raise_for_status()
    completion, left_out, given = (stream.request.sampling for stream in served.engine.streams)
    wanted = SamplingParams(16, 0.6, 0.95, 20, min_p=0.1, repetition_penalty=1.05)
    assert completion == wanted, "16 is OpenAI's for completions, and vLLM's"
    assert left_out == replace(wanted, max_tokens=100)
    assert given == SamplingParams(200, 0.0), "a request may ask for more"
    (note,) = served.http.get("/status").json()["notes"]
    assert (
        "temperature 0.6, top_p 0.95, top_k 20, min_p 0.1, repetition_penalty 1.05, max_tokens 100 of chats"
        in note
    )


def test_every_parameter_reaches_the_engine(served: RunningServer) -> None:
    body = {
        "prompt": "x",
        "max_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "seed": 11,
        "stop": ["\n", "END"],
        "stop_token_ids": [2],
        "ignore_eos": True,
        "min_tokens": 3,
        "cache_salt": "tenant-a",
        "priority": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.25,
        "logit_bias": {"50": -100, "7": 2.5},
        "logprobs": 2,
        "echo": True,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
    }
    served.http.post("/v1/completions", json=body).raise_for_status()
    request = served.engine.streams[0].request
    assert request.sampling == SamplingParams(
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        seed=11,
        stop=("\n", "END"),
        stop_token_ids=(2,),
        ignore_eos=True,
        min_tokens=3,
        min_p=0.1,
        repetition_penalty=1.2,
        presence_penalty=-0.5,
        frequency_penalty=0.25,
        logit_bias=((50, -100.0), (7, 2.5)),
        logprobs=2,
        prompt_logprobs=2,
        skip_special_tokens=False,
        include_stop=True,
    )
    # What vLLM's clients call 5 is later than 0, and the engine lets the higher one go first.
    assert (request.cache_salt, request.priority) == ("tenant-a", -5)


def test_nulls_neutral_values_and_unknown_fields_are_tolerated(served: RunningServer) -> None:
    names = (
        "model max_tokens temperature top_p top_k seed stop stop_token_ids ignore_eos min_tokens stream "
        "stream_options cache_salt priority n logprobs echo logit_bias tools response_format presence_penalty "
        "max_completion_tokens best_of min_p repetition_penalty frequency_penalty suffix truncate_prompt_tokens"
    )
    nulls = dict.fromkeys(names.split())
    neutral = {
        "n": 1,
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "top_k": -1,
        "echo": False,
        "logprobs": False,
    }
    for extra in (nulls, neutral, {"kv_transfer_params": {"a": 1}, "user": "me", "no_such_field": [1]}):
        answer = served.http.post("/v1/completions", json={"prompt": "x", **extra})
        assert answer.status_code == 200, answer.text
    assert {stream.request.sampling for stream in served.engine.streams} == {
        SamplingParams(max_tokens=16, temperature=1.0)
    }


def test_a_single_stop_text(served: RunningServer) -> None:
    served.http.post("/v1/completions", json={"prompt": "x", "stop": "\n"}).raise_for_status()
    assert served.engine.streams[0].request.sampling.stop == ("\n",)


def test_an_event_is_one_line_for_every_client(served: RunningServer) -> None:
    text = "".join(map(chr, (0x0A, 0x0D, 0x0B, 0x0C, 0x1C, 0x1D, 0x1E, 0x85, 0x2028, 0x2029, 0x41)))
    served.engine.control = Control(pieces=(text,))
    body = {"prompt": "x", "stream": True}
    with served.http.stream("POST", "/v1/completions", json=body) as answer:
        events = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
    assert "".join(event["choices"][0]["text"] for event in events) == text
