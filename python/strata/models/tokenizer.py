"""Text to token ids and back: a thin layer over `tokenizers`, the model's chat template, and safe streaming.

A text is the bytes of its tokens, with U+FFFD for those that are no UTF-8. Streaming never shows half a character: its
bytes are held back until it is whole.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.meta
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.pre_tokenizers import ByteLevel

from strata.errors import ModelError, RequestError
from strata.models.config import ModelConfig, read_json

REPLACEMENT_CHARACTER = "\ufffd"
_MOMENTS = (datetime(2001, 2, 3, 4, 5), datetime(2012, 11, 25, 16, 17))
"""Two that differ in all that a template may write of a date or a time."""
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    AttributeError,
    LookupError,
    ArithmeticError,
    RecursionError,
)
"""What a template may raise over messages and tools that it was not written for."""
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
"""How SentencePiece spells a token of one byte."""
SPECIAL_TOKEN_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")


class Tokenizer:
    """The tokenizer of one model folder."""

    def __init__(self, fast: FastTokenizer, settings: Mapping[str, Any], config: ModelConfig) -> None:
        _check_decoder(fast)
        self._fast = _without_trimmed_offsets(fast)
        self._special_tokens = {
            role: _content(settings[role]) for role in SPECIAL_TOKEN_ROLES if settings.get(role)
        }
        self._template_source = _template_source(settings.get("chat_template"))
        self._template = _compile_template(self._template_source, self._strftime_now)
        self._template_variables = _variables_of(self._template, self._template_source)
        self._token_bytes: dict[int, bytes] = {}
        self._special_ids = {
            token_id for token_id, token in fast.get_added_tokens_decoder().items() if token.special
        }
        self._now: datetime | None = None
        self.template_writes_date: bool = self._writes_date()
        """Whether a chat's prompt holds the date or the time: then tomorrow's prompt is another one from there on."""
        self.vocab_size: int = fast.get_vocab_size(with_added_tokens=True)
        self.highest_token_id: int = max(fast.get_vocab(with_added_tokens=True).values(), default=-1)
        if self.highest_token_id >= config.vocab_size:
            raise ModelError(
                f"the tokenizer's highest token id is {self.highest_token_id}, "
                f"but the model's vocab_size is {config.vocab_size}; "
                "tokenizer.json and config.json in --model belong to different models"
            )
        named = self._special_tokens.get("eos_token")
        eos = fast.token_to_id(named) if named is not None else None
        self.eos_token_ids: frozenset[int] = frozenset(config.eos_token_ids) | (
            {eos} if eos is not None else set()
        )

    @property
    def has_chat_template(self) -> bool:
        """Whether the folder brings a chat template."""
        return self._template is not None

    @property
    def template_takes_tools(self) -> bool:
        """Whether the chat template shows the model which tools there are."""
        return "tools" in self._template_variables

    @property
    def template_marks_tool_calls(self) -> bool:
        """Whether the model was taught to call tools as `<tool_call>{...}</tool_call>`, in the way of Hermes."""
        return "<tool_call>" in self._template_source

    def fix_date(self, day: date | None) -> None:
        """From now on, chat templates take `day`, at midnight, for now; None: whatever time it is."""
        self._now = None if day is None else datetime.combine(day, datetime.min.time())

    def _writes_date(self) -> bool:
        """For `__init__` alone: a chat that was rendered meanwhile would be given a wrong date."""
        if self._template is None:
            return False
        prompts = set()
        try:
            for self._now in _MOMENTS:
                prompts.add(self.apply_chat_template([{"role": "user", "content": "Hello"}]))
        except RequestError:
            return False
        finally:
            self._now = None
        return len(prompts) > 1

    def _strftime_now(self, pattern: str) -> str:
        return (self._now or datetime.now()).strftime(pattern)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``. Rendered chat templates hold their special tokens: pass False for them. Raises
        RequestError for a text that is no valid Unicode."""
        if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
            raise RequestError(
                "the text holds half a surrogate pair (\\ud800 to \\udfff): send valid Unicode"
            )
        ids: list[int] = self._fast.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ``token_ids``; bytes that are no UTF-8 become U+FFFD."""
        text = self._decode(token_ids, skip_special_tokens)
        if REPLACEMENT_CHARACTER in text:
            # Some decoders show whole characters so too, where bytes beside them are no UTF-8.
            stream = self.detokenizer(skip_special_tokens)
            text = "".join(map(stream.push, token_ids)) + stream.finish()
        return text

    def _decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        text: str = self._fast.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def info(self) -> dict[str, str | None]:
        """Special tokens by role, as `tokenizer_config.json` names them, and the chat template."""
        return {**self._special_tokens, "chat_template": self._template_source or None}

    def to_json(self) -> str:
        """The tokenizer as `tokenizer.json` has it."""
        text: str = self._fast.to_str()
        return text

    def token_text(self, token_id: int) -> str:
        """The text of one token in the middle of others, special tokens included; bytes that are no UTF-8 become
        U+FFFD."""
        return self.token_bytes(token_id).decode(errors="replace")

    def token_bytes(self, token_id: int, begins: bool = False) -> bytes:
        """What one token adds to a text's UTF-8, be it a part of a character alone. ``begins``: the text begins with
        it, where some decoders drop a space. Empty for an id that is no token."""
        if begins:
            return self._bytes_of(token_id, self._decode([token_id]))
        data = self._token_bytes.get(token_id)
        if data is None:
            # The second of two is not the beginning.
            one, two = (self._decode([token_id] * count) for count in (1, 2))
            data = self._token_bytes[token_id] = self._bytes_of(token_id, two[len(one) :])
        return data

    def _bytes_of(self, token_id: int, text: str) -> bytes:
        """A token that ends or begins inside a character has no text: its spelling tells which bytes it has."""
        spelling = self._fast.id_to_token(token_id) if REPLACEMENT_CHARACTER in text else None
        if spelling is None:
            return text.encode()
        if byte := _BYTE_TOKEN.fullmatch(spelling):
            return bytes.fromhex(byte[1])
        letters = _letters_of_bytes()
        if all(letter in letters for letter in spelling):
            return bytes(letters[letter] for letter in spelling)
        return text.encode()

    def is_shown(self, token_id: int, skip_special_tokens: bool) -> bool:
        """Whether a text that is decoded so has this token in it."""
        skipped = skip_special_tokens and token_id in self._special_ids
        return not skipped and self._fast.id_to_token(token_id) is not None

    def token_offsets(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Where each token of `encode` begins in ``text``, in characters. Those of one character have its offset; a
        token that the text does not have, such as one that begins every prompt, has that of the next."""
        offsets: list[int] = []
        furthest = 0
        for start, end in self._fast.encode(text, add_special_tokens=add_special_tokens).offsets:
            offsets.append(start if start < end else furthest)
            furthest = max(furthest, end)
        return offsets

    def detokenizer(
        self, skip_special_tokens: bool = True, before: Sequence[int] = ()
    ) -> IncrementalDetokenizer:
        """A fresh state for streaming one answer, whose text goes on where that of the tokens ``before`` ends."""
        return IncrementalDetokenizer(self, skip_special_tokens, self.is_empty(before, skip_special_tokens))

    def is_empty(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> bool:
        """Whether these tokens have no text, so that what follows them begins one."""
        return not any(self.is_shown(int(token_id), skip_special_tokens) for token_id in token_ids)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt for a conversation; a `RequestError` if there is no template or it refuses."""
        if self._template is None:
            raise RequestError(
                "this model has no chat template; send a plain prompt to /v1/completions instead", "messages"
            )
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                **{**self._special_tokens, "tools": None, "documents": None, **variables},
            )
        except _TEMPLATE_ERRORS as error:
            raise RequestError(
                f"the model's chat template refuses these messages: {error}", "messages"
            ) from error


class IncrementalDetokenizer:
    """Turns token ids into text as they arrive; all pieces and `finish` together equal the whole text."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True, begins: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._begins = begins

    def push(self, token_id: int) -> str:
        """The text that ``token_id`` completes; empty while a character is unfinished."""
        if not self._tokenizer.is_shown(token_id, self._skip_special_tokens):
            return ""
        data = self._tokenizer.token_bytes(token_id, self._begins)
        self._begins = False
        return self._characters.decode(data)

    def finish(self) -> str:
        """What is still held back, at the end of the answer."""
        return self._characters.decode(b"", final=True)


def load_tokenizer(folder: Path, config: ModelConfig) -> Tokenizer:
    """The tokenizer of a Hugging Face folder; a `ModelError` names the file that is missing or malformed."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(
            f"{path} does not exist; --model needs a folder with a fast tokenizer (tokenizer.json)"
        )
    try:
        fast = FastTokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception for every malformed file
        raise ModelError(f"{path} is no readable tokenizer: {error}") from error
    # A folder may ask for truncation or padding meant for training batches; a prompt is never cut here.
    fast.no_truncation()
    fast.no_padding()
    settings_path = folder / "tokenizer_config.json"
    settings = read_json(settings_path) if settings_path.is_file() else {}
    template_path = folder / "chat_template.jinja"
    if template_path.is_file():
        settings["chat_template"] = template_path.read_text(encoding="utf-8")
    return Tokenizer(fast, settings, config)


@cache
def _letters_of_bytes() -> dict[str, int]:
    """Byte-level vocabularies write each byte as one printable character: itself, or else one from U+0100 on, in the
    order of the bytes."""
    alphabet = set(ByteLevel.alphabet())
    others = iter(sorted(letter for letter in alphabet if ord(letter) > 0xFF))
    return {(chr(byte) if chr(byte) in alphabet else next(others)): byte for byte in range(256)}


def _check_decoder(fast: FastTokenizer) -> None:
    """Raises ModelError for a decoder that writes a token by what comes after it: its text cannot be streamed."""
    state = fast.decoder.__getstate__() if fast.decoder else b""
    for kind in ("BPEDecoder", "CTC"):
        if f'"type":"{kind}"'.encode() in state:
            raise ModelError(
                f"the tokenizer's decoder {kind} writes a token by what follows it, and such text cannot be streamed; "
                "use a model whose tokenizer is byte-level BPE or SentencePiece"
            )


def _without_trimmed_offsets(fast: FastTokenizer) -> FastTokenizer:
    """The tokenizer itself, whose tokens begin with their spaces: some folders leave them out of the offsets."""
    processor = fast.post_processor
    if processor is not None:
        state = processor.__getstate__()
        processor.__setstate__(state.replace(b'"trim_offsets":true', b'"trim_offsets":false'))
        fast.post_processor = processor
    return fast


def _content(token: Any) -> str:
    """A special token as text; older folders describe it as an object."""
    return str(token["content"] if isinstance(token, dict) else token)


def _template_source(template: Any) -> str:
    """The chat template as text; empty if there is none."""
    if isinstance(template, list):
        named = {item["name"]: item["template"] for item in template}
        template = named.get("default", next(iter(named.values()), None))
    return template or ""


def _variables_of(template: jinja2.Template | None, source: str) -> set[str]:
    """What the chat template reads of what it is given."""
    return jinja2.meta.find_undeclared_variables(template.environment.parse(source)) if template else set()


def _compile_template(template: str, strftime_now: Callable[[str], str]) -> jinja2.Template | None:
    if not template:
        return None
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = strftime_now
    try:
        return environment.from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise ModelError(
            f"the chat template in --model is malformed (line {error.lineno}): {error.message}"
        ) from error


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which a model has never seen in training.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
