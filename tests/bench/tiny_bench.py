"""A tiny model that reads words, so that whole measurements run in seconds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from strata.config import ModelOptions
from strata.engine.served_model import ServedModel
from strata.models import tiny_random_model

VOCABULARY = 97


class CharacterTokenizer:
    """A token a character. What the engine and the benches ask of a tokenizer, and no more."""

    eos_token_ids: frozenset[int] = frozenset()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids below the tiny model's vocabulary."""
        return [ord(character) % VOCABULARY for character in text]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Some text of equal length."""
        return "".join(chr(ord("!") + token) for token in token_ids)

    def detokenizer(
        self, skip_special_tokens: bool = True, before: Sequence[int] = ()
    ) -> CharacterDetokenizer:
        """A fresh state for one answer."""
        return CharacterDetokenizer()


class CharacterDetokenizer:
    """Shows each token at once."""

    def push(self, token_id: int) -> str:
        """The token's character."""
        return chr(ord("!") + token_id)

    def finish(self) -> str:
        """Nothing is held back."""
        return ""


def tiny_served(options: ModelOptions | None = None) -> ServedModel:
    """The model that `main(load=...)` takes."""
    tokenizer: Any = CharacterTokenizer()
    return ServedModel(tiny_random_model(0), tokenizer, "tiny", "tiny")


def write_lines(path: Path, records: Sequence[Any]) -> Path:
    """A JSON lines file."""
    path.write_text("\n".join(json.dumps(record) for record in records), encoding="utf-8")
    return path
