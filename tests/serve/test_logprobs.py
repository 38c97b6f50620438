"""Tokens as log probabilities show them: their bytes are the text, their offsets places in it, over any tokenizer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from gguf_files import byte_level, fields_of, sentence_piece
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import processors

from strata.engine.api import Chunk, TokenLogprob
from strata.engine.text import StoppingText
from strata.models import Tokenizer, ensure_default_model, load_config
from strata.models.gguf_tokenizer import build_tokenizer
from strata.models.tokenizer import load_tokenizer
from strata.serve.chat import ChatBody, ChatDialect
from strata.serve.completions import CompletionBody, CompletionDialect
from strata.serve.generation import Answer
from strata.serve.logprobs import LogprobColumns, ShownTokens

KINDS = ("default", "byte level, offsets trimmed", "sentence piece", "sentence piece, no prefix")
EMOJI = "😀a é漢😀b"
LIKELIEST = range(120, 260, 10)
"""In every place; all vocabularies have bytes there."""
TEXTS = st.text(min_size=1, max_size=12) | st.lists(
    st.sampled_from([" the", " paris", " ", "  ", "a", "é", "漢字", " 😀", "👩\u200d👧", "\n", "<|im_end|>"]),
    min_size=1,
    max_size=8,
).map("".join)
Row = tuple[str, int]
"""A token as it is shown, and its offset."""


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    folder = ensure_default_model()
    config = load_config(folder)
    if kind == "default":
        return load_tokenizer(folder, config)
    if kind.startswith("byte level"):
        fast = build_tokenizer(fields_of(byte_level("llama-bpe")))
        # As the folders of Llama 3 have it.
        fast.post_processor = processors.Sequence([processors.ByteLevel(), fast.post_processor])
    else:
        fast = build_tokenizer(fields_of(sentence_piece(add_space_prefix="no prefix" not in kind)))
    return Tokenizer(fast, {}, config)


def chunks_of(
    tokenizer: Tokenizer, ids: list[int], skip: bool, stop: str, before: Sequence[int] = ()
) -> Iterator[Chunk]:
    """What the engine sends of an answer."""
    text = StoppingText(tokenizer.detokenizer(skip, before), [stop] if stop else [])
    for number, token in enumerate(ids):
        piece, stopped = text.push(token)
        ends = stopped or number == len(ids) - 1
        piece += text.finish() if ends and not stopped else ""
        yield Chunk(piece, (token,), "stop" if ends else None, logprobs=(scored(token),))
        if ends:
            return


def scored(token: int) -> TokenLogprob:
    return TokenLogprob(token, -9.0, tuple((other, -1.0 - place) for place, other in enumerate(LIKELIEST)))


def completion(
    tokenizer: Tokenizer, prompt: str | list[int], ids: list[int], stream: bool = False, **fields: Any
) -> tuple[str, list[Row]]:
    """Text, and tokens with their offsets, of one choice with `echo`."""
    stop, skip = fields.pop("stop", ""), fields.get("skip_special_tokens", True)
    body = CompletionBody(prompt=prompt, stream=stream, **{"logprobs": 5, "echo": True, **fields})
    dialect = CompletionDialect("default", body, tokenizer)
    tokens = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    answer = Answer(0, tokens, SimpleNamespace(), max_tokens=len(ids))  # type: ignore[arg-type]
    if body.echo:
        answer.own_prompt_logprobs = (None, *map(scored, tokens[1:]))
    choices: list[Any] = []
    for chunk in chunks_of(tokenizer, ids, skip, stop, tokens):
        answer.add(chunk)
        choices.append(dialect.piece(answer, chunk) if stream else None)
    shown = [choice for choice in choices if choice] if stream else [dialect.whole(answer)]
    rows: list[Row] = []
    for columns in [choice["logprobs"] for choice in shown if choice["logprobs"]]:
        rows += zip(columns["tokens"], columns["text_offset"], strict=True)
        for token, top in zip(columns["tokens"], columns["top_logprobs"], strict=True):
            assert top is None or (token in top and len(top) >= len(LIKELIEST)), "two tokens share a name"
    return "".join(choice["text"] for choice in shown), rows


def bytes_of(name: str) -> bytes:
    """Of a token that is shown so."""
    if re.fullmatch(r"bytes:(\\x[0-9a-f]{2})+", name):
        return bytes.fromhex(name.removeprefix("bytes:").replace("\\x", ""))
    return name.encode()


def offsets_due(text: str, tokens: list[bytes]) -> list[int]:
    """Characters of the text that are whole before each token."""
    data, place, due = text.encode(), 0, []
    for token in tokens:
        due.append(len(data[:place].decode(errors="ignore")))
        place += len(token)
    return due


@pytest.mark.parametrize("stream", [False, True])
def test_characters_of_several_tokens(stream: bool) -> None:
    tokenizer = tokenizer_of("default")
    face = [r"bytes:\xf0\x9f", r"bytes:\x98", r"bytes:\x80"]
    due = [*face, "a", " é", r"bytes:\xe6", r"bytes:\xbc", r"bytes:\xa2", *face, "b"]
    ids = tokenizer.encode(EMOJI)
    for prompt in (EMOJI, ids):
        text, rows = completion(tokenizer, prompt, ids, stream)
        assert text == EMOJI + EMOJI
        assert [name for name, _ in rows] == due + due
        offsets = [0, 0, 0, 1, 2, 4, 4, 4, 5, 5, 5, 6]
        assert [offset for _, offset in rows] == [*offsets, *(7 + offset for offset in offsets)]
    # Beside a space, which the vocabulary merges with the beginning of a character.
    text, rows = completion(tokenizer, "a 😀 b", tokenizer.encode("!"), stream)
    assert rows == [("a", 0), (r"bytes:\x20\xf0\x9f\x98", 1), (r"bytes:\x80", 2), (" b", 3), ("!", 5)]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=120, deadline=None)
@given(data=st.data(), prompt=TEXTS, answer=TEXTS)
def test_the_bytes_of_all_tokens_are_the_text(kind: str, data: Any, prompt: str, answer: str) -> None:
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode(answer, add_special_tokens=False)
    # The default vocabulary lacks bytes that its training text never held; SentencePiece has no word for its space.
    assume(ids and tokenizer.decode(ids) == answer and tokenizer.decode(tokenizer.encode(prompt)) == prompt)
    stream, as_ids = data.draw(st.booleans()), data.draw(st.booleans())
    sent = tokenizer.encode(prompt) if as_ids else prompt
    text, rows = completion(tokenizer, sent, ids, stream)
    if kind == "sentence piece" and prompt:
        answer = " " + answer  # which begins every text that is encoded alone
    begin = tokenizer.decode([1], skip_special_tokens=False) if kind.startswith("sentence") else "<|begin|>"
    begins = kind != "default" and not as_ids
    assert text == (tokenizer.decode(sent, skip_special_tokens=False) if as_ids else prompt) + answer
    if begins:
        assert rows.pop(0) == (begin, 0), "the tokenizer's own token is not shown"
    tokens = [bytes_of(name) for name, _ in rows]
    assert b"".join(tokens) == text.encode()
    assert [offset for _, offset in rows] == offsets_due(text, tokens)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    stream=st.booleans(),
    skip=st.booleans(),
    stop=st.sampled_from(["", "", "t", "\ufffd", "the a", "\n"]),
)
def test_a_whole_token_stands_at_its_offset(
    kind: str, data: Any, stream: bool, skip: bool, stop: str
) -> None:
    tokenizer = tokenizer_of(kind)
    some = st.integers(0, tokenizer.vocab_size - 1)
    ids = data.draw(st.lists(some | some.map(lambda token: token % 300), min_size=1, max_size=30))
    text, rows = completion(tokenizer, "the é", ids, stream, stop=stop, echo=False, skip_special_tokens=skip)
    special = {tokenizer.token_text(token) for token in ids if not tokenizer.is_shown(token, skip)}
    whole, _ = completion(tokenizer, "the é", ids, echo=False, skip_special_tokens=skip)
    assert whole.startswith(text) and len(rows) <= len(ids)
    for name, offset in rows:
        if not re.match(r"bytes:\\x", name) and name not in special:
            # A token that a stop text cut off stands where it would have stood.
            assert whole[offset : offset + len(name)] == name
    assert [offset for _, offset in rows] == sorted(offset for _, offset in rows)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stream", [False, True])
@settings(max_examples=60, deadline=None)
@given(answer=TEXTS)
def test_the_bytes_of_a_chat_are_its_text(kind: str, stream: bool, answer: str) -> None:
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode(answer, add_special_tokens=False)
    assume(ids and tokenizer.decode(ids) == answer)
    body = ChatBody(messages=[{"role": "user", "content": "x"}], logprobs=True, top_logprobs=2, stream=stream)
    dialect = ChatDialect("default", body, tokenizer)
    reply = Answer(0, [1], SimpleNamespace(), max_tokens=len(ids))  # type: ignore[arg-type]
    choices: list[Any] = []
    for chunk in chunks_of(tokenizer, ids, True, ""):
        reply.add(chunk)
        choices.append(dialect.piece(reply, chunk) if stream else None)
    shown = [choice for choice in choices if choice] if stream else [dialect.whole(reply)]
    text = "".join(choice["delta" if stream else "message"]["content"] for choice in shown)
    entries = [entry for choice in shown for entry in choice["logprobs"]["content"]]
    assert text == answer and len(entries) == len(ids)
    assert b"".join(bytes(entry["bytes"]) for entry in entries) == text.encode()
    others = [other for entry in entries for other in entry["top_logprobs"]]
    assert all(bytes_of(each["token"]) == bytes(each["bytes"]) for each in (*entries, *others))


def test_a_prompt_that_is_not_what_its_tokens_say() -> None:
    """A character that the vocabulary lacks leaves no token, one that is composed another token; echo shows both."""
    lacks = "a\x14 b"
    text, rows = completion(tokenizer_of("default"), lacks, tokenizer_of("default").encode("c"))
    assert (text, rows) == (lacks + "c", [("a", 0), (" b", 2), ("c", 4)])
    fast = build_tokenizer(fields_of(byte_level("qwen2", add_bos_token=False)))
    qwen = Tokenizer(fast, {}, load_config(ensure_default_model()))
    text, rows = completion(qwen, "e\u0301x", qwen.encode("t"))
    assert (text, rows) == ("e\u0301xt", [(r"bytes:\xc3", 0), (r"bytes:\xa9", 0), ("x", 2), ("t", 3)])


def test_token_ids_keep_the_offsets_of_the_text() -> None:
    tokenizer = tokenizer_of("default")
    ids = tokenizer.encode(EMOJI)
    for prompt in (EMOJI, ids):
        _, rows = completion(tokenizer, prompt, ids[:4], return_tokens_as_token_ids=True)
        assert [name for name, _ in rows] == [f"token_id:{token}" for token in (*ids, *ids[:4])]
        assert [offset for _, offset in rows] == [0, 0, 0, 1, 2, 4, 4, 4, 5, 5, 5, 6, 7, 7, 7, 8]


def test_tokens_that_look_alike_have_names_of_their_own() -> None:
    """A byte and a piece of the same letter; an id that is no token."""
    tokenizer = tokenizer_of("sentence piece")
    piece, byte = (tokenizer._fast.token_to_id(spelling) for spelling in ("a", "<0x61>"))
    tokens = ShownTokens(tokenizer)
    assert tokens.name_of(piece) == tokens.name_of(byte) == "a"
    columns = LogprobColumns()
    entry = TokenLogprob(byte, -2.0, ((piece, -1.0), (40_000, -3.0), (40_001, -4.0)))
    columns.add([byte], [entry], tokens)
    taken = columns.take()
    assert taken is not None and taken["tokens"] == ["a"]
    due = {f"token_id:{piece}": -1.0, "": -3.0, "token_id:40001": -4.0, "a": -2.0}
    assert taken["top_logprobs"] == [due]


def test_without_a_tokenizer_tokens_are_ids() -> None:
    tokens = ShownTokens(None)
    assert (tokens.name_of(7), tokens.bytes_of(7), tokens.push(7), tokens.push(8)) == (
        "token_id:7",
        b"",
        0,
        0,
    )
