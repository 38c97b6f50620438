"""The protocol with a real model behind it: log probabilities are the model's own, answers fit their schemas, bad input
is a client's error."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
import uvicorn

from strata.config import StrataConfig
from strata.engine import Engine, load_served_model
from strata.serve.app import create_app
from strata.serve.binding import bind, url_of

DOCUMENT = "The river Rhine rises in the Swiss Alps and flows north into the North Sea. " * 4


@dataclass
class Served:
    engine: Engine
    http: httpx.Client
    openai: openai.OpenAI

    def complete(self, **body: Any) -> dict[str, Any]:
        answer = self.http.post("/v1/completions", json={"temperature": 0, **body})
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def logprobs_of(self, ids: list[int]) -> torch.Tensor:
        return self.engine._served.model.reference_forward(ids).log_softmax(-1)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root: Path = tmp_path_factory.mktemp("kv")
    config = StrataConfig.of(
        port=0, disk_path=root, disk_capacity=0, device_memory="128MiB", host_memory="64MiB", batch_tokens=64
    )
    engine = Engine(config, load_served_model(config.model))
    bound = bind(config.server)
    server = uvicorn.Server(uvicorn.Config(create_app(engine, config), log_config=None, lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    url = url_of(bound)
    with httpx.Client(base_url=url, timeout=60) as http:
        yield Served(engine, http, openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0))
    server.should_exit = True
    thread.join(20)
    engine.shutdown(drain_s=0, demote_s=0)
    bound.close()


def test_prompt_logprobs_as_lm_eval_reads_them(served: Served) -> None:
    cached = served.complete(prompt=DOCUMENT, max_tokens=4)["choices"][0]["text"]
    ids = served.engine.tokenizer.encode(DOCUMENT)
    body = {"prompt": [ids, ids[:20]], "echo": True, "logprobs": 1, "max_tokens": 1, "seed": 1234}
    answer = served.complete(**body)
    assert answer["usage"]["strata"]["computed"] == len(ids) + 20
    for choice, prompt in zip(answer["choices"], (ids, ids[:20]), strict=True):
        logprobs = choice["logprobs"]
        assert len(logprobs["tokens"]) == len(prompt) + 1
        assert "".join(logprobs["tokens"]) == choice["text"]
        due = served.logprobs_of(prompt)
        assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
        for place in range(1, len(prompt)):
            own, top = logprobs["token_logprobs"][place], logprobs["top_logprobs"][place]
            assert own == pytest.approx(float(due[place - 1][prompt[place]]), abs=1e-3)
            best = due[place - 1].max()
            assert max(top.values()) == pytest.approx(float(best), abs=1e-3)
            assert (max(top.values()) == own) == (int(due[place - 1].argmax()) == prompt[place])
        assert logprobs["token_logprobs"][-1] == max(logprobs["top_logprobs"][-1].values())
    again = served.complete(prompt=DOCUMENT, max_tokens=4)
    assert again["choices"][0]["text"] == cached
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_chat_logprobs(served: Served) -> None:
    answer = served.openai.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": "Name a river."}],
        max_completion_tokens=6,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
    )
    choice = answer.choices[0]
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert "".join(each.token for each in choice.logprobs.content) == choice.message.content
    for each in choice.logprobs.content:
        assert len(each.top_logprobs) == 3
        assert each.top_logprobs[0].token == each.token, "a greedy token is the likeliest one"


def test_logprobs_of_characters_split_over_tokens(served: Served) -> None:
    prompt = "😀a é漢😀b"
    choice = served.complete(prompt=prompt, echo=True, logprobs=1, max_tokens=1)["choices"][0]
    columns, text = choice["logprobs"], choice["text"]
    face = [r"bytes:\xf0\x9f", r"bytes:\x98", r"bytes:\x80"]
    due = [*face, "a", " é", r"bytes:\xe6", r"bytes:\xbc", r"bytes:\xa2", *face, "b"]
    assert columns["tokens"][:-1] == due
    assert columns["text_offset"] == [0, 0, 0, 1, 2, 4, 4, 4, 5, 5, 5, 6, 7]
    assert text == prompt + columns["tokens"][-1]
    pairs = zip(columns["tokens"][1:], columns["top_logprobs"][1:], strict=True)
    assert all(token in top for token, top in pairs)


@pytest.mark.parametrize("stream", [False, True])
def test_the_bytes_of_a_chat_are_its_text(served: Served, stream: bool) -> None:
    asked: dict[str, Any] = {
        "model": "default",
        "messages": [{"role": "user", "content": "Smile."}],
        "logprobs": True,
        "top_logprobs": 5,
        "extra_body": {"guided_choice": ["😀 漢字"]},
    }
    if stream:
        choices = [chunk.choices[0] for chunk in served.openai.chat.completions.create(**asked, stream=True)]
        text = "".join(choice.delta.content or "" for choice in choices)
        found = [token for choice in choices if choice.logprobs for token in choice.logprobs.content or ()]
    else:
        whole = served.openai.chat.completions.create(**asked).choices[0]
        assert whole.logprobs is not None
        text, found = whole.message.content or "", whole.logprobs.content or []
    end = served.engine.tokenizer.token_text(min(served.engine.tokenizer.eos_token_ids))
    tokens = [token for token in found if token.token != end]
    assert text == "😀 漢字" and len(tokens) > len(text)
    assert b"".join(bytes(token.bytes or ()) for token in tokens) == text.encode()
    for token in tokens:
        assert len({each.token for each in token.top_logprobs}) == 5


@pytest.mark.parametrize("stream", [False, True])
def test_json_fits_its_schema(served: Served, stream: bool) -> None:
    schema = {
        "type": "object",
        "properties": {
            "river": {"type": "string", "maxLength": 20},
            "length_km": {"type": "integer", "maximum": 9999},
        },
        "required": ["river", "length_km"],
        "additionalProperties": False,
    }
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "River", "schema": schema, "strict": True}}
    asked: dict[str, Any] = {
        "model": "default",
        "messages": [{"role": "user", "content": f"{DOCUMENT} Describe the river as JSON."}],
        "response_format": wanted,
        "temperature": 0.7,
        "seed": 4,
        "max_tokens": 60,
    }
    if stream:
        chunks = list(served.openai.chat.completions.create(**asked, stream=True))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        reason = chunks[-1].choices[0].finish_reason
    else:
        choice = served.openai.chat.completions.create(**asked).choices[0]
        text, reason = choice.message.content or "", choice.finish_reason
    assert reason == "stop"
    found = json.loads(text)
    assert set(found) == {"river", "length_km"}
    assert isinstance(found["river"], str) and isinstance(found["length_km"], int)


def test_choices_and_penalties(served: Served) -> None:
    assert served.complete(prompt="Yes or no?", guided_choice=["yes", "no"])["choices"][0]["text"] in (
        "yes",
        "no",
    )
    prompt = "one two one two one two one two one"
    choice = served.complete(prompt=prompt, max_tokens=8, logprobs=0)["choices"][0]
    plain, first = choice["text"], choice["logprobs"]["tokens"][0]
    for option in {"repetition_penalty": 1.8}, {"frequency_penalty": 2.0}:
        assert served.complete(prompt=prompt, max_tokens=8, **option)["choices"][0]["text"] != plain
    (ban,) = served.http.post("/tokenize", json={"prompt": first}).json()["tokens"]
    banned = served.complete(prompt=prompt, max_tokens=1, logit_bias={ban: -100})
    assert banned["choices"][0]["text"] != first
    several = served.complete(prompt="A random word:", n=3, seed=3, temperature=1.5, max_tokens=6)
    texts = [choice["text"] for choice in several["choices"]]
    assert len(set(texts)) > 1
    again = served.complete(prompt="A random word:", n=3, seed=3, temperature=1.5, max_tokens=6)
    assert [choice["text"] for choice in again["choices"]] == texts


def test_tokens_there_and_back(served: Served) -> None:
    chat = {"messages": [{"role": "user", "content": "Grüße 👋"}]}
    ids = served.http.post("/tokenize", json=chat).json()["tokens"]
    text = served.http.post("/detokenize", json={"tokens": ids}).json()["prompt"]
    assert text.endswith("Grüße 👋<|im_end|>\n<|im_start|>assistant\n")
    beyond = served.http.post("/detokenize", json={"tokens": [*ids, 49152]})
    assert beyond.status_code == 400 and "the vocabulary ends with 49151" in beyond.text
    info = served.http.get("/tokenizer_info").json()
    assert info["eos_token"] == "<|im_end|>" and "add_generation_prompt" in info["chat_template"]
    answer = served.http.post("/v1/chat/completions", json={**chat, "max_tokens": 1}).json()
    assert answer["usage"]["prompt_tokens"] == len(ids)


@pytest.mark.parametrize(
    ("content", "param"),
    [
        (b'{"prompt": "\\ud800"}', "prompt"),
        (b'{"prompt": "x", "cache_salt": "\\ud800"}', "cache_salt"),
        (b'{"prompt": "x", "stop": "\\udc00", "max_tokens": 1, "logit_bias": {"49152": 1}}', "logit_bias"),
        (b'{"prompt": [49152]}', "prompt"),
        (b'{"prompt": "x", "guided_json": {"type": "nonsense"}}', "guided_json"),
        (b'{"prompt": "x", "guided_regex": "\\ud800"}', "guided_regex"),
        (b'{"prompt": "x", "guided_choice": ["\\ud800"]}', "guided_choice"),
        (
            b'{"prompt": "x", "response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/x"}}}}',
            "response_format",
        ),
        (b'{"prompt": "x", "priority": 99999999999}', "priority"),
        (b'{"prompt": "x", "structured_outputs": {"regex": "("}, "stream": true}', "structured_outputs"),
    ],
)
def test_bad_input_is_no_defect_and_the_answer_names_the_field(
    served: Served, content: bytes, param: str
) -> None:
    headers = {"Content-Type": "application/json"}
    answer = served.http.post("/v1/completions", content=content, headers=headers)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "invalid_value", param)


def test_tools_are_refused_where_the_template_has_no_place_for_them(served: Served) -> None:
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
    }
    answer = served.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400 and "no place for tools" in answer.json()["error"]["message"]
