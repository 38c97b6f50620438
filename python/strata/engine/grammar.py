"""Answers that fit a JSON schema, a regular expression or a Lark grammar, by llguidance: before each token its mask
says which tokens may follow.

A grammar's state is the tokens of its answer and nothing else, so it outlasts a preemption.
"""

from __future__ import annotations

import threading
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Protocol

import llguidance
import numpy as np
import numpy.typing as npt

from strata.engine.api import Grammar
from strata.errors import RequestError

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# One space, as in the JSON that models were trained on: with free white space a small model may write nothing else.
_JSON_STYLE: JsonCompileOptions = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
_SHOWN = 300
_LIMITS = llguidance.LLParserLimits(
    max_grammar_size=100_000, max_lexer_states=20_000, step_lexer_fuel=30_000, step_max_items=20_000
)
"""Every mask is made between two steps of all requests: a few milliseconds at most, and 40 MB of states."""
_LONGEST = 64 << 10
"""Characters of a grammar."""
_KEPT = 8
"""Grammars that are kept as they were read: choices of one prompt have the same, and so have many clients' requests."""


class GrammarTokenizer(Protocol):
    """What `strata.models.Tokenizer` offers."""

    eos_token_ids: frozenset[int]

    def to_json(self) -> str: ...


class GrammarState:
    """Where one answer stands in its grammar."""

    def __init__(self, matcher: llguidance.LLMatcher, vocabulary: int, asked_as: str | None) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._asked_as = asked_as

    @property
    def ended(self) -> bool:
        """Whether nothing more can follow."""
        return self._matcher.is_stopped()

    def allowed(self) -> npt.NDArray[np.bool_]:
        """The tokens that may come next, bool [vocab]: an end token alone where nothing else can."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        return np.unpackbits(bits, count=self._vocabulary, bitorder="little").astype(bool)

    def take(self, token: int) -> None:
        """Takes the next token in. Raises RequestError where the grammar has grown too complex to go on."""
        self._matcher.consume_token(token)
        if self._matcher.is_error():
            why = _first_line(self._matcher.get_error())
            raise RequestError(
                f"the answer cannot go on within its grammar: {why}; ask for a simpler one", self._asked_as
            )


class Grammars:
    """Reads grammars for one model. Thread-safe."""

    def __init__(self, tokenizer: GrammarTokenizer | None, vocabulary: int) -> None:
        self._source = tokenizer
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._read_once = lru_cache(_KEPT)(self._read)

    def start(self, grammar: Grammar) -> GrammarState:
        """The beginning of an answer. Takes milliseconds, the first one up to a second; raises RequestError for what is
        no grammar, is too long, or has parts that cannot be kept."""
        if len(grammar.source) > _LONGEST:
            raise RequestError(
                f"the {grammar.kind} has {len(grammar.source)} characters, and at most {_LONGEST} are read; shorten it",
                grammar.asked_as,
            )
        return GrammarState(self._read_once(grammar).deep_copy(), self._vocabulary, grammar.asked_as)

    def _read(self, grammar: Grammar) -> llguidance.LLMatcher:
        if self._source is None:
            raise RequestError("a grammar needs a tokenizer, and this engine has none", grammar.asked_as)
        with self._lock:
            tokenizer = self._tokenizer
        try:
            text = _as_llguidance(grammar)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"the {grammar.kind} cannot be read: {error}", grammar.asked_as) from error
        matcher = llguidance.LLMatcher(tokenizer, text, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            why = _first_line(matcher.get_error())
            raise RequestError(f"the {grammar.kind} cannot be kept to: {why}", grammar.asked_as)
        return matcher

    @cached_property
    def _tokenizer(self) -> llguidance.LLTokenizer:
        assert self._source is not None
        ends = sorted(self._source.eos_token_ids)
        return llguidance.LLTokenizer(self._source.to_json(), self._vocabulary, eos_token=ends or None)


def _as_llguidance(grammar: Grammar) -> str:
    if grammar.kind == "json_schema":
        return llguidance.LLMatcher.grammar_from_json_schema(grammar.source, defaults=_JSON_STYLE)
    if grammar.kind == "regex":
        return llguidance.LLMatcher.grammar_from_regex(grammar.source)
    return llguidance.LLMatcher.grammar_from_lark(grammar.source)


def _first_line(error: str) -> str:
    return error.split("\n<state>")[0].strip().replace("\n", " ")[:_SHOWN]
