"""The OpenAPI document is a promise: what fits it and what does not is answered without a 5xx, and every failure has
OpenAI's shape. schemathesis makes the requests up; the engine is a fake, so no weather of a model plays a part.
"""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from fake_engine import FakeEngine
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from strata.config import StrataConfig
from strata.serve.app import create_app

CONFIG = StrataConfig.of(disk_capacity=0, allowed_hosts="testserver")  # schemathesis asks under that name
ENGINE = FakeEngine(CONFIG)
SCHEMA = schemathesis.openapi.from_asgi("/openapi.json", create_app(ENGINE, CONFIG))
OPERATIONS: list[Any] = [found.ok() for found in SCHEMA.get_all_operations()]
WITH_BODY = [operation for operation in OPERATIONS if operation.body]
QUICK, LONG = 40, 1500
AS_DOCUMENTED = [status_code_conformance, content_type_conformance, response_schema_conformance]


def by_label(operations: list[Any]) -> Any:
    return pytest.mark.parametrize("operation", operations, ids=lambda operation: operation.label)


def undocumented(schema: dict[str, Any], value: Any) -> set[str]:
    """Keys of an answer that its schema does not name; where it names none, any may be there."""
    if "$ref" in schema:
        schema = SCHEMA.raw_schema["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    if "anyOf" in schema:
        return set.intersection(*(undocumented(each, value) for each in schema["anyOf"]))
    if isinstance(value, list):
        return set().union(*(undocumented(schema.get("items", {}), each) for each in value))
    named = schema.get("properties")
    if named is None:
        return set() if not isinstance(value, dict) or schema.get("type") in (None, "object") else set(value)
    if not isinstance(value, dict):
        return set()
    inside = (undocumented(named[key], each) for key, each in value.items() if key in named)
    return (value.keys() - named.keys()).union(*inside)


def explore(operation: Any, mode: GenerationMode, examples: int) -> set[int]:
    """Sends made-up requests and returns the statuses that came back."""
    statuses = set()

    # The same requests each time: a test that fails today must not pass tomorrow by luck. `soak` looks further.
    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=examples == QUICK,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy(mode))
    def send(case: Any) -> None:
        if mode is GenerationMode.POSITIVE and isinstance(case.body, dict) and "model" in case.body:
            case.body["model"] = (
                "default"  # nearly every other name is refused before anything else is looked at
            )
        answer = case.call()
        statuses.add(answer.status_code)
        assert answer.status_code < 500, f"{case.as_curl_command()}\n{answer.text}"
        case.validate_response(answer, checks=AS_DOCUMENTED)
        if answer.headers["content-type"] == "application/json":
            status = str(answer.status_code)
            documented = operation.definition.raw["responses"]
            found = documented.get(status) or documented[f"{status[0]}XX"]
            assert not undocumented(found["content"]["application/json"].get("schema", {}), answer.json())
        if answer.status_code >= 400:
            error = answer.json()["error"]
            assert set(error) == {"message", "type", "param", "code"} and error["message"]

    send()
    return statuses


@by_label(OPERATIONS)
def test_what_fits_the_document_is_never_a_5xx(operation: Any) -> None:
    statuses = explore(operation, GenerationMode.POSITIVE, QUICK)
    if operation.path in ("/v1/completions", "/v1/chat/completions"):
        assert 200 in statuses, (
            "made-up bodies must get past the checks, or this says nothing of what lies behind"
        )


@by_label(WITH_BODY)
def test_what_does_not_fit_the_document_is_refused_and_never_a_5xx(operation: Any) -> None:
    """Some of it is taken all the same: unknown fields are ignored, and `1` passes for a flag."""
    assert 400 in explore(operation, GenerationMode.NEGATIVE, QUICK)


@pytest.mark.soak
@by_label(WITH_BODY)
@pytest.mark.parametrize(
    "mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=lambda mode: mode.value
)
def test_a_long_search_finds_no_5xx(operation: Any, mode: GenerationMode) -> None:
    explore(operation, mode, LONG)
