"""What clients ask for beside plain answers: log probabilities, echo, choices, tools, token ids, request ids."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from fake_engine import Control
from running_server import RunningServer
from test_completions import events_of

from strata.serve.tool_calls import ToolCallParser

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'


def joined(pieces: list[dict[str, Any]], index: int = 0) -> tuple[str, dict[str, list[Any]]]:
    """Text and columns of one choice of a streamed completion."""
    text, columns = "", {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for piece in pieces:
        for choice in piece["choices"]:
            if choice["index"] == index:
                text += choice["text"]
                for name, values in (choice["logprobs"] or {}).items():
                    columns[name] += values
    return text, columns


@pytest.mark.parametrize("stream", [False, True])
def test_what_lm_eval_asks_for(served: RunningServer, stream: bool) -> None:
    served.engine.control = Control(pieces=("!",))
    body = {
        "prompt": [[72, 105], [65, 66, 67]],
        "echo": True,
        "logprobs": 1,
        "max_tokens": 1,
        "temperature": 0,
    }
    answer = served.http.post("/v1/completions", json={**body, "stream": stream, "seed": 1234})
    for index, text in enumerate(("Hi!", "ABC!")):
        if stream:
            found, logprobs = joined(events_of(answer.text)[:-1], index)
        else:
            choice = answer.json()["choices"][index]
            found, logprobs = choice["text"], choice["logprobs"]
        assert found == text
        assert logprobs["tokens"] == list(text)
        assert logprobs["token_logprobs"] == [None, *[-1.0] * (len(text) - 1)]
        assert logprobs["top_logprobs"] == [None, *({"a": -2.0, own: -1.0} for own in text[1:])]
        assert logprobs["text_offset"] == list(range(len(text)))


def test_echo_of_the_prompt_alone(served: RunningServer) -> None:
    answer = served.openai.completions.create(
        model="default", prompt="AB", echo=True, max_tokens=0, logprobs=0, extra_body={"n": 2}
    )
    assert [choice.text for choice in answer.choices] == ["AB", "AB"]
    assert [choice.finish_reason for choice in answer.choices] == ["length", "length"]
    assert answer.choices[1].logprobs is not None
    assert answer.choices[1].logprobs.token_logprobs == [None, -1.0]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 0)
    assert served.engine.streams[0].request.sampling.max_tokens == 1
    body = {"prompt": "AB", "echo": True, "max_tokens": 0, "stream": True}
    assert joined(events_of(served.http.post("/v1/completions", json=body).text)[:-1])[0] == "AB"


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_is_scored_once_for_all_its_choices(served: RunningServer, stream: bool) -> None:
    served.engine.control = Control(pieces=("!",))
    body = {"prompt": ["Hi", "ABC"], "n": 3, "echo": True, "logprobs": 1, "max_tokens": 1, "stream": stream}
    answer = served.http.post("/v1/completions", json=body)
    assert [each.request.sampling.prompt_logprobs for each in served.engine.streams] == [1, None, None] * 2
    for index in range(6):
        if stream:
            found, logprobs = joined(events_of(answer.text)[:-1], index)
        else:
            choice = answer.json()["choices"][index]
            found, logprobs = choice["text"], choice["logprobs"]
        text = ("Hi!", "ABC!")[index // 3]
        assert found == text and logprobs["tokens"] == list(text)
        assert logprobs["token_logprobs"] == [None, *[-1.0] * (len(text) - 1)]


def test_log_probabilities_of_a_prompt_are_bounded(served: RunningServer) -> None:
    body = {"prompt": ["x" * 4000] * 10, "echo": True, "logprobs": 20, "max_tokens": 1}
    error = served.http.post("/v1/completions", json=body).json()["error"]
    assert error["code"] == "too_many_logprobs" and not served.engine.streams


def test_tokens_may_be_named_by_their_ids(served: RunningServer) -> None:
    body = {"prompt": "x", "logprobs": 1, "return_tokens_as_token_ids": True}
    logprobs = served.http.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"][0] == "token_id:72"
    assert logprobs["top_logprobs"][0] == {"token_id:97": -2.0, "token_id:72": -1.0}


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_of_prompts_and_answers(served: RunningServer, stream: bool) -> None:
    served.engine.control = Control(pieces=("He", "", "y"))
    body = {"prompt": ["ab", "c"], "n": 2, "return_token_ids": True, "stream": stream}
    answer = served.http.post("/v1/completions", json=body)
    objects = events_of(answer.text)[:-1] if stream else [answer.json()]
    for index, prompt in enumerate(("ab", "ab", "c", "c")):
        choices = [choice for each in objects for choice in each["choices"] if choice["index"] == index]
        assert [token for choice in choices for token in choice["token_ids"]] == list(map(ord, "Hey"))
        shown = [choice["prompt_token_ids"] for choice in choices if "prompt_token_ids" in choice]
        assert shown == [list(map(ord, prompt))]


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_of_a_chat(served: RunningServer, stream: bool) -> None:
    served.engine.control = Control(pieces=("He", "", "y"))
    answer = served.http.post(
        "/v1/chat/completions", json={**CHAT, "return_token_ids": True, "stream": stream}
    )
    objects = events_of(answer.text)[:-1] if stream else [answer.json()]
    assert [token for each in objects for token in each["choices"][0]["token_ids"]] == list(map(ord, "Hey"))
    several = served.http.post(
        "/v1/chat/completions", json={**CHAT, "n": 3, "return_token_ids": True, "stream": stream}
    )
    for answered in (objects, events_of(several.text)[:-1] if stream else [several.json()]):
        shown = [each["prompt_token_ids"] for each in answered if "prompt_token_ids" in each]
        assert shown == [list(map(ord, "<user>Hi<assistant>"))]
    assert "token_ids" not in served.http.post("/v1/chat/completions", json=CHAT).json()["choices"][0]


def test_chat_logprobs_by_the_sdk(served: RunningServer) -> None:
    served.engine.control = Control(pieces=("é", "", "b"))
    asked: dict[str, Any] = {"model": "default", "logprobs": True, "top_logprobs": 2, **CHAT}
    answer = served.openai.chat.completions.create(**asked)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert [(each.token, each.logprob, each.bytes) for each in logprobs.content] == [
        ("é", -1.0, [0xC3, 0xA9]),
        ("b", -1.0, [98]),
    ]
    assert [each.token for each in logprobs.content[0].top_logprobs] == ["a", "b"]
    tokens = []
    for chunk in served.openai.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            if choice.logprobs is not None and choice.logprobs.content is not None:
                tokens += [each.token for each in choice.logprobs.content]
    assert tokens == ["é", "b"]
    plain = served.openai.chat.completions.create(model="default", **CHAT)
    assert plain.choices[0].logprobs is None


@pytest.mark.parametrize("stream", [False, True])
def test_several_choices(served: RunningServer, stream: bool) -> None:
    body = {"prompt": ["ab", "c"], "n": 3, "best_of": 3, "seed": 7, "stream": stream}
    answer = served.http.post("/v1/completions", json={**body, "stream_options": {"include_usage": True}})
    requests = [each.request for each in served.engine.streams]
    assert [each.sampling.seed for each in requests] == [7, 8, 9, 7, 8, 9]
    assert [list(each.prompt_token_ids) for each in requests] == [[97, 98]] * 3 + [[99]] * 3
    if stream:
        *pieces, last, _ = events_of(answer.text)
        usage = last["usage"]
        assert {joined(pieces, index)[0] for index in range(6)} == {"Hello, world"}
    else:
        usage = answer.json()["usage"]
        assert [choice["index"] for choice in answer.json()["choices"]] == list(range(6))
    assert usage["prompt_tokens"] == 3 == usage["strata"]["computed"], (
        "a prompt counts once, not once a choice"
    )
    assert usage["completion_tokens"] == 72


def test_choices_of_a_chat(served: RunningServer) -> None:
    answer = served.openai.chat.completions.create(model="default", n=2, **CHAT)
    assert [choice.message.content for choice in answer.choices] == ["Hello, world"] * 2
    assert served.engine.streams[0].request.sampling.seed is None


def test_usage_on_every_piece(served: RunningServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "Hi", "stream": True, "stream_options": options}
    *pieces, last, _ = events_of(served.http.post("/v1/completions", json=body).text)
    assert [piece["usage"]["completion_tokens"] for piece in pieces] == [5, 7, 12, 12]
    assert pieces[0]["usage"] == {"prompt_tokens": 2, "completion_tokens": 5, "total_tokens": 7}
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_both_names_of_the_token_limit(served: RunningServer, path: str) -> None:
    for body, limit in (
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 6}, 6),
        ({"max_tokens": 5, "max_completion_tokens": 6}, 6),
        ({"max_tokens": 5, "max_completion_tokens": None}, 5),
    ):
        served.http.post(path, json={**CHAT, "prompt": "x", **body}).raise_for_status()
        assert served.engine.streams[-1].request.sampling.max_tokens == limit


def test_tools_reach_the_template_and_calls_come_back(served: RunningServer) -> None:
    served.engine.control = Control(pieces=("Let me", " see. <tool", CALL[5:30], CALL[30:], "\n", CALL))
    asked: dict[str, Any] = {"model": "default", "tools": [TOOL], **CHAT}
    answer = served.openai.chat.completions.create(**asked, tool_choice="auto")
    prompt = served.engine.streams[0].request.prompt_token_ids
    assert served.engine.tokenizer.decode(prompt) == "<tool>weather<user>Hi<assistant>"
    choice = answer.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see. ")
    assert choice.message.tool_calls is not None and len(choice.message.tool_calls) == 2
    for call in choice.message.tool_calls:
        assert call.type == "function" and call.function.name == "weather"
        assert json.loads(call.function.arguments) == {"city": "Köln"}
    text, calls, reason = "", {}, None
    for chunk in served.openai.chat.completions.create(**asked, stream=True):
        delta = chunk.choices[0].delta
        text += delta.content or ""
        reason = chunk.choices[0].finish_reason or reason
        calls.update({call.index: call for call in delta.tool_calls or []})
    assert (text, reason, sorted(calls)) == ("Let me see. ", "tool_calls", [0, 1])


def test_tool_messages_reach_the_template(served: RunningServer) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    body = {"messages": messages, "tools": [TOOL], "tool_choice": "none"}
    served.http.post("/v1/chat/completions", json=body).raise_for_status()
    prompt = served.engine.tokenizer.decode(served.engine.streams[0].request.prompt_token_ids)
    assert prompt == "<user>Hi<assistant><call>{'city': 'Bonn'}<tool>rain<assistant>"


@pytest.mark.parametrize(
    "thought",
    [
        {"reasoning_content": "Hm. "},
        {"reasoning": "Hm. ", "reasoning_content": None},
        {"reasoning_content": "Hm. ", "reasoning": {"effort": "low"}},
    ],
)
def test_what_an_assistant_thought_reaches_the_template(
    served: RunningServer, thought: dict[str, Any]
) -> None:
    messages = [*CHAT["messages"], {"role": "assistant", **thought, "content": "Hello"}, *CHAT["messages"]]
    served.http.post("/v1/chat/completions", json={"messages": messages}).raise_for_status()
    prompt = served.engine.tokenizer.decode(served.engine.streams[0].request.prompt_token_ids)
    assert prompt == "<user>Hi<assistant>Hm. Hello<user>Hi<assistant>"


@pytest.mark.parametrize(
    ("text", "shown", "calls"),
    [
        (f"a{CALL}b", "ab", 1),
        (f"{CALL}\n{CALL}", "", 2),
        ("<tool_call>{}</tool_call>", "<tool_call>{}</tool_call>", 0),
        ("<tool_call>not JSON</tool_call> x", "<tool_call>not JSON</tool_call> x", 0),
        (CALL.removesuffix("</tool_call>"), "", 1),
        ("a <tool_call>{", "a <tool_call>{", 0),
        ("a < b <tool", "a < b <tool", 0),
        ('<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', "", 1),
    ],
)
def test_text_is_parted_however_it_comes(text: str, shown: str, calls: int) -> None:
    for size in (1, 2, 7, len(text)):
        parser = ToolCallParser()
        parts = [parser.push(text[place : place + size]) for place in range(0, len(text), size)]
        parts.append(parser.finish())
        assert "".join(part for part, _ in parts) == shown
        assert sum(len(found) for _, found in parts) == calls == parser.calls


def test_tokenize_and_detokenize(served: RunningServer) -> None:
    answer = served.http.post("/tokenize", json={"prompt": "Hé", "return_token_strs": True}).json()
    assert answer == {"count": 2, "max_model_len": 4096, "tokens": [72, 233], "token_strs": ["H", "é"]}
    chat = served.http.post("/tokenize", json={**CHAT, "add_generation_prompt": False}).json()
    assert chat["tokens"] == [ord(character) for character in "<user>Hi"] and chat["token_strs"] is None
    assert served.http.post("/detokenize", json={"tokens": [72, 233]}).json() == {"prompt": "Hé"}
    assert served.http.get("/tokenizer_info").json() == {"eos_token": "\0", "chat_template": None}


def test_template_variables(served: RunningServer) -> None:
    body = {**CHAT, "chat_template_kwargs": {"enable_thinking": False}}
    served.http.post("/v1/chat/completions", json=body).raise_for_status()
    prompt = served.engine.tokenizer.decode(served.engine.streams[0].request.prompt_token_ids)
    assert prompt.startswith("enable_thinking")


def test_a_request_has_an_id(served: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "strata.serve"):
        own = served.http.post("/v1/completions", json={"prompt": "x"}, headers={"X-Request-Id": "run-7:3"})
    assert own.headers["x-request-id"] == "run-7:3" and own.json()["id"] == "cmpl-run-7:3"
    assert any(record.getMessage().endswith("id run-7:3") for record in caplog.records)
    made = {served.http.get("/health").headers["x-request-id"] for _ in range(2)}
    assert len(made) == 2 and all(len(each) == 32 for each in made)
    for bad in ("two words", "x" * 129, "a\tb"):
        answer = served.http.get("/v1/nothing", headers={"X-Request-Id": bad})
        assert answer.status_code == 404 and len(answer.headers["x-request-id"]) == 32
    body = {"stream": True, **CHAT}
    streamed = served.http.post("/v1/chat/completions", json=body, headers={"X-Request-Id": "s1"})
    assert streamed.headers["x-request-id"] == "s1"
    assert events_of(streamed.text)[0]["id"] == "chatcmpl-s1"
