"""How many tokens a text has: by a tokenizer, or by an estimate that says that it is one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer

from strata.errors import ConfigError

TOKENIZER_FILE = "tokenizer.json"
DEFAULT_CHARACTERS_PER_TOKEN = 4.0


class TokenCounter(Protocol):
    """Counts tokens."""

    @property
    def note(self) -> str:
        """How it counts, in a sentence."""
        ...

    def count(self, text: str) -> int:
        """Tokens of `text`, at least 1 unless it is empty."""
        ...


@dataclass(frozen=True)
class CharacterEstimate:
    """So many characters are a token."""

    characters_per_token: float = DEFAULT_CHARACTERS_PER_TOKEN

    def __post_init__(self) -> None:
        if not 0.1 <= self.characters_per_token <= 100:
            raise ConfigError(
                f"--characters-per-token {self.characters_per_token:g} is not between 0.1 and 100; English has about 4"
            )

    @property
    def note(self) -> str:
        """How it counts."""
        return (
            f"tokens are an estimate, {self.characters_per_token:g} characters each: no tokenizer was given "
            "(--tokenizer)"
        )

    def count(self, text: str) -> int:
        """Tokens of `text`."""
        return max(1, round(len(text) / self.characters_per_token)) if text else 0


class TokenizerCount:
    """Counted by a Hugging Face fast tokenizer, without the special tokens of a template."""

    def __init__(self, path: Path) -> None:
        """`path`: a tokenizer.json, or a model's folder with one. Raises ConfigError."""
        file = path / TOKENIZER_FILE if path.is_dir() else path
        if not file.is_file():
            raise ConfigError(
                f"--tokenizer {path}: {file} does not exist; give a {TOKENIZER_FILE} or a folder with one"
            )
        try:
            self._fast = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception for every malformed file
            raise ConfigError(
                f"--tokenizer {file} is no readable tokenizer: {error}; give another"
            ) from error
        self._fast.no_truncation()
        self._fast.no_padding()
        # A folder's name says which model it is; the path before it is nobody's business.
        self._name = f"{file.resolve().parent.name}/{file.name}"

    @property
    def note(self) -> str:
        """How it counts."""
        return f"tokens are counted by {self._name}, without a chat template"

    def count(self, text: str) -> int:
        """Tokens of `text`."""
        return len(self._fast.encode(text, add_special_tokens=False).ids)


def counter_of(tokenizer: Path | None, characters_per_token: float | None) -> TokenCounter:
    """The counter that the flags ask for. Raises ConfigError."""
    if tokenizer is not None and characters_per_token is not None:
        raise ConfigError(
            f"--tokenizer {tokenizer} counts tokens, and --characters-per-token {characters_per_token:g} estimates "
            "them: give one of the two"
        )
    if tokenizer is not None:
        return TokenizerCount(tokenizer)
    return CharacterEstimate(characters_per_token or DEFAULT_CHARACTERS_PER_TOKEN)
