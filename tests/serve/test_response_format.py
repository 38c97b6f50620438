"""Every spelling of what an answer must fit reaches the engine as one grammar."""

from __future__ import annotations

import json
from typing import Any

import pytest
from running_server import RunningServer

from strata.engine import Grammar

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
OF_SCHEMA = Grammar("json_schema", json.dumps(SCHEMA))
WRAPPED = {"type": "json_schema", "json_schema": {"name": "A", "schema": SCHEMA, "strict": True}}


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"response_format": None}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar("json_schema", '{"type": "object"}')),
        ({"response_format": WRAPPED}, OF_SCHEMA),
        ({"structured_outputs": {"json": SCHEMA}}, OF_SCHEMA),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, OF_SCHEMA),
        ({"structured_outputs": {"regex": "a+"}}, Grammar("regex", "a+")),
        ({"structured_outputs": {"choice": ["a", 'b"']}}, Grammar("lark", 'start: "a" | "b\\""')),
        ({"guided_json": SCHEMA}, OF_SCHEMA),
        ({"guided_regex": "a+"}, Grammar("regex", "a+")),
        ({"guided_choice": ["é"]}, Grammar("lark", 'start: "\\u00e9"')),
        ({"json_schema": SCHEMA}, OF_SCHEMA),
        ({"json_schema": json.dumps(SCHEMA)}, OF_SCHEMA),
        ({"regex": "a+", "ebnf": None, "stop_regex": []}, Grammar("regex", "a+")),
        ({"structured_outputs": {"regex": "a+", "disable_any_whitespace": True}}, Grammar("regex", "a+")),
        ({"structured_outputs": {"whitespace_pattern": None, "grammar": None}}, None),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_spellings(served: RunningServer, path: str, fields: dict[str, Any], grammar: Grammar | None) -> None:
    body = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], **fields}
    answer = served.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    asked = served.engine.streams[0].request.sampling.grammar
    assert asked == grammar
    assert asked is None or asked.asked_as in fields


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": {"type": "xml"}}, "response_format", "'json_schema'"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "type json_schema"),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA}},
            "response_format",
            "format.schema is not",
        ),
        ({"structured_outputs": {"grammar": "g"}}, "structured_outputs", "use json, regex, choice"),
        (
            {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " "}},
            "structured_outputs",
            "whitespace",
        ),
        (
            {"structured_outputs": {"jsn": SCHEMA}},
            "structured_outputs",
            "structured_outputs.jsn is not supported",
        ),
        ({"regex": "a", "json_schema": SCHEMA}, "json_schema", "json_schema and regex ask for a form each"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs", "at least 1"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_regex", "guided_regex and guided_choice"),
        ({"guided_grammar": "g"}, "guided_grammar", "not supported"),
        ({"guided_regex": "a", "guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "send null"),
        ({"ebnf": "root ::= a"}, "ebnf", "not supported"),
        ({"stop_regex": "a+"}, "stop_regex", "not supported"),
        ({"lora_path": "adapter"}, "lora_path", "not supported"),
        ({"no_stop_trim": True}, "no_stop_trim", "send false"),
    ],
)
def test_refusals(served: RunningServer, fields: dict[str, Any], param: str, words: str) -> None:
    answer = served.http.post("/v1/completions", json={"prompt": "x", **fields})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and words in error["message"]
    assert served.engine.streams == []
