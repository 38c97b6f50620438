"""Answers fit what was asked for, whatever the model would rather say and whoever runs beside."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from engine_harness import MakeEngine, Sizes, tiny_served, wait_idle
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from strata.engine import Engine, GenerationRequest, Grammar, SamplingParams, ServedModel
from strata.engine import grammar as grammars
from strata.errors import RequestError
from strata.models import Tokenizer

END = 96
PROMPT = [(3 * place + 2) % 96 for place in range(30)]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "tags": {"type": "array", "maxItems": 2}},
    "required": ["name", "tags"],
    "additionalProperties": False,
}
PERSON["properties"]["tags"]["items"] = {"enum": ["red", "blue"]}  # type: ignore[index]


@pytest.fixture(scope="module")
def spoken() -> ServedModel:
    """The tiny model with a byte-level tokenizer of the printable characters and an end token."""
    characters = [chr(code) for code in range(ord("!"), ord("!") + 94)]
    words = {**{text: place for place, text in enumerate(characters)}, "Ġ": 94, "Ċ": 95, "<end>": END}
    fast = FastTokenizer(models.BPE(words, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(["<end>"])
    served = tiny_served()
    return ServedModel(
        served.model, Tokenizer(fast, {"eos_token": "<end>"}, served.model.config), "spoken", "spoken"
    )


def answer(engine: Engine, grammar: Grammar, most: int = 80, **sampling: object) -> tuple[str, str | None]:
    text, reason = "", None
    params = SamplingParams(max_tokens=most, grammar=grammar, **sampling)
    for chunk in engine.submit(GenerationRequest(PROMPT, params)):
        text += chunk.text
        reason = chunk.finish_reason
    return text, reason


def fits_person(text: str) -> bool:
    found = json.loads(text)
    return (
        set(found) == {"name", "tags"}
        and isinstance(found["name"], str)
        and len(found["name"]) <= 6
        and len(found["tags"]) <= 2
        and set(found["tags"]) <= {"red", "blue"}
    )


@pytest.mark.parametrize("seed", range(4))
def test_json_fits_its_schema(make_engine: MakeEngine, spoken: ServedModel, seed: int) -> None:
    engine = make_engine(served=spoken)
    grammar = Grammar("json_schema", json.dumps(PERSON))
    for sampling in ({}, {"temperature": 2.0}, {"temperature": 1.0, "ignore_eos": True, "min_tokens": 60}):
        text, reason = answer(engine, grammar, seed=seed, **sampling)
        assert reason == "stop", text
        assert fits_person(text), text
    wait_idle(engine)


def test_other_forms(make_engine: MakeEngine, spoken: ServedModel) -> None:
    engine = make_engine(served=spoken)
    for seed in range(4):
        text, reason = answer(engine, Grammar("regex", "[a-c]{3}-[0-9]+x"), temperature=1.5, seed=seed)
        assert (re.fullmatch("[a-c]{3}-[0-9]+x", text) is not None) == (reason == "stop")
        choices = Grammar("lark", 'start: "yes" | "no, \\"never\\""')
        assert answer(engine, choices, temperature=3.0, seed=seed)[0] in ("yes", 'no, "never"')
    assert answer(engine, Grammar("regex", "a+b"), 4, logit_bias=((ord("b") - ord("!"), -100.0),)) == (
        "aaaa",
        "length",
    )


def test_a_grammar_outlasts_preemptions(make_engine: MakeEngine, spoken: ServedModel) -> None:
    grammar = Grammar("json_schema", json.dumps(PERSON))
    options = [{"temperature": 1.5, "seed": seed, "grammar": grammar} for seed in range(12)]
    alone = make_engine(served=spoken)
    due = [answer(alone, grammar, 60, temperature=1.5, seed=seed)[0] for seed in range(12)]
    crowded = make_engine(served=spoken, sizes=Sizes(device=24, host=40, disk_bytes=0))
    streams = [
        crowded.submit(GenerationRequest(PROMPT, SamplingParams(max_tokens=60, **each))) for each in options
    ]
    texts = ["".join(chunk.text for chunk in stream) for stream in streams]
    assert texts == due
    assert crowded.stats()["preemptions"] > 0, "nobody was preempted: the pool is too large for this test"
    wait_idle(crowded)


def test_a_grammar_is_read_once(
    make_engine: MakeEngine, spoken: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, read = make_engine(served=spoken), []
    compiled = grammars._as_llguidance
    monkeypatch.setattr(grammars, "_as_llguidance", lambda grammar: read.append(grammar) or compiled(grammar))
    due = answer(engine, Grammar("regex", "[a-c]{3}x"), temperature=1.5, seed=1)
    assert due[1] == "stop"
    for _ in range(3):
        assert answer(engine, Grammar("regex", "[a-c]{3}x"), temperature=1.5, seed=1) == due
    assert len(read) == 1


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (Grammar("json_schema", "{"), "cannot be read"),
        (Grammar("json_schema", '{"type": "nonsense"}'), "Invalid type: nonsense"),
        (Grammar("json_schema", '{"not": {"type": "string"}}'), 'Unimplemented keys: ["not"]'),
        (Grammar("json_schema", '{"$ref": "#/nowhere"}'), "does not exist"),
        (Grammar("json_schema", "[" * 5000 + "]" * 5000), "cannot be read"),
        (Grammar("regex", "("), "unclosed group"),
        (Grammar("lark", "start: nobody"), "unknown name"),
        (Grammar("regex", "a" * 65_537), "65537 characters"),
    ],
)
def test_what_cannot_be_done_is_refused(
    make_engine: MakeEngine, spoken: ServedModel, grammar: Grammar, words: str
) -> None:
    engine = make_engine(served=spoken)
    asked = replace(grammar, asked_as="guided_json")
    with pytest.raises(RequestError, match=re.escape(words)) as caught:
        engine.submit(GenerationRequest(PROMPT, SamplingParams(grammar=asked)))
    assert caught.value.field == "guided_json"
    wait_idle(engine)


def test_a_grammar_that_grows_too_complex_is_named() -> None:
    class Exhausted:
        def consume_token(self, token: int) -> bool:
            return False

        def is_error(self) -> bool:
            return True

        def get_error(self) -> str:
            return "too many states"

    with pytest.raises(RequestError, match="too many states; ask for a simpler one") as caught:
        grammars.GrammarState(Exhausted(), 8, "guided_regex").take(1)
    assert caught.value.field == "guided_regex"


def test_an_engine_without_tokenizer_has_no_grammars(make_engine: MakeEngine) -> None:
    with pytest.raises(RequestError, match="needs a tokenizer"):
        make_engine().submit(GenerationRequest(PROMPT, SamplingParams(grammar=Grammar("regex", "a"))))
