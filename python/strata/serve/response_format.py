"""The fields that say what an answer must fit: OpenAI's `response_format`, vLLM's `structured_outputs` with its older
forms `guided_json`, `guided_regex` and `guided_choice`, and SGLang's `json_schema` and `regex`.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from strata.engine.api import Grammar
from strata.serve.errors import ApiError

_ANY_OBJECT = Grammar("json_schema", '{"type": "object"}')
_SHOWN = 80
Schema = dict[str, Any] | bool | str


class JsonSchema(BaseModel):
    """A schema with a name, as OpenAI wraps it."""

    name: str | None = None
    json_schema: dict[str, Any] | bool | None = Field(None, alias="schema")


class _Form(BaseModel):
    """An object that names a form. A key that is not known may ask for more than is done, so it is refused."""

    model_config = ConfigDict(extra="allow")

    def refuse_unknown(self, field: str, known: str) -> None:
        """Raises ApiError 400."""
        for name, value in (self.model_extra or {}).items():
            if value is not None and value is not False:
                message = f"{field}.{name[:_SHOWN]} is not supported; leave it out, and use {known}"
                raise ApiError(400, message, "unsupported_value", field)


class ResponseFormat(_Form):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def grammar(self) -> Grammar | None:
        """Raises ApiError 400."""
        self.refuse_unknown("response_format", "json_schema for a schema")
        if self.type == "text":
            return None
        if self.type == "json_object":
            return _ANY_OBJECT
        if self.json_schema is None or self.json_schema.json_schema is None:
            message = 'response_format needs {"json_schema": {"schema": {...}}} with type json_schema'
            raise ApiError(400, message, "invalid_value", "response_format")
        return _of_schema(self.json_schema.json_schema, "response_format")


class StructuredOutputs(_Form):
    """vLLM's `structured_outputs`. White space is never free here, and there is nothing to fall back to."""

    json_schema: Schema | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = Field(None, min_length=1, fail_fast=True)
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_fallback: bool | None = None


class FormatFields(BaseModel):
    """The part of a body that asks for a form."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = Field(None, min_length=1, fail_fast=True)
    json_schema: Schema | None = None
    regex: str | None = None

    def grammar(self) -> Grammar | None:
        """What the answer must fit. Raises ApiError 400 for more than one form, or one that is not supported."""
        wanted = self.structured_outputs or StructuredOutputs.model_validate({})
        wanted.refuse_unknown("structured_outputs", "json, regex, choice or json_object")
        found: dict[str, Grammar | None] = {
            "response_format": self.response_format.grammar() if self.response_format else None,
            "structured_outputs.json": _of_schema(wanted.json_schema, "structured_outputs"),
            "structured_outputs.regex": _of_regex(wanted.regex),
            "structured_outputs.choice": _of_choice(wanted.choice),
            "structured_outputs.json_object": _ANY_OBJECT if wanted.json_object else None,
            "guided_json": _of_schema(self.guided_json, "guided_json"),
            "guided_regex": _of_regex(self.guided_regex),
            "guided_choice": _of_choice(self.guided_choice),
            "json_schema": _of_schema(self.json_schema, "json_schema"),
            "regex": _of_regex(self.regex),
        }
        given = {name: grammar for name, grammar in found.items() if grammar is not None}
        if not given:
            return None
        name, grammar = next(iter(given.items()))
        field = name.split(".")[0]
        if len(given) > 1:
            message = f"{' and '.join(given)} ask for a form each; send one of them"
            raise ApiError(400, message, "invalid_value", field)
        return replace(grammar, asked_as=field)


def _of_schema(schema: Schema | None, field: str) -> Grammar | None:
    if schema is None:
        return None
    try:
        return Grammar("json_schema", schema if isinstance(schema, str) else json.dumps(schema))
    except RecursionError:
        raise ApiError(400, f"{field}: the schema is nested too deeply", "invalid_value", field) from None


def _of_regex(regex: str | None) -> Grammar | None:
    return None if regex is None else Grammar("regex", regex)


def _of_choice(choices: list[str] | None) -> Grammar | None:
    """One of these texts, as a Lark grammar, whose quoted texts are JSON's."""
    if choices is None:
        return None
    return Grammar("lark", "start: " + " | ".join(json.dumps(choice) for choice in choices))
