"""The tokenizer inside a GGUF file as a `tokenizers` one: byte-level BPE ('gpt2') or SentencePiece BPE ('llama').

A GGUF names the way it splits text instead of describing it. A name that is not known here is refused: another
split would give other tokens without a word.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from strata.errors import ModelError

# Kinds of tokens in `tokenizer.ggml.token_type`.
NORMAL_TOKEN, CONTROL_TOKEN, USER_DEFINED_TOKEN, BYTE_TOKEN = 1, 3, 4, 6
SPACE = "\u2581"
"""What SentencePiece writes for a space."""

_GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_LLAMA3_SPLIT = rf"{_WORDS}|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2_SPLIT = rf"{_WORDS}|\p{{N}}|{_TAIL}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN_SPLIT = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Split:
    """How text is split before byte pairs are merged.

    ``single_digits``: digits are cut apart first. ``whole_words``: a word that is a token stays whole, whatever the
    merges say. ``begins``: text begins with the begin token unless the file says otherwise. ``composed``: characters
    are composed (NFC) first.
    """

    pattern: str
    single_digits: bool = False
    whole_words: bool = False
    begins: bool = False
    composed: bool = False


_LLAMA3 = Split(_LLAMA3_SPLIT, whole_words=True, begins=True)
SPLITS = {
    "default": Split(_GPT2_SPLIT),
    "gpt-2": Split(_GPT2_SPLIT),
    "smollm": Split(_GPT2_SPLIT, single_digits=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": Split(_QWEN2_SPLIT, composed=True),
    "deepseek-r1-qwen": Split(_QWEN2_SPLIT),
    "tekken": Split(_TEKKEN_SPLIT, whole_words=True, begins=True),
}
"""By the name under `tokenizer.ggml.pre`."""


def build_tokenizer(fields: dict[str, Any]) -> Tokenizer:
    """The tokenizer that a GGUF's metadata describe. Raises `ModelError`, and KeyError for a key that is not there."""
    kind = fields["tokenizer.ggml.model"]
    if kind == "gpt2":
        tokenizer = _byte_level(fields)
    elif kind == "llama":
        tokenizer = _sentence_piece(fields)
    else:
        raise ModelError(
            f"GGUF tokenizer {kind!r} is not supported, only 'gpt2' (byte-level BPE) and 'llama' (SentencePiece "
            "BPE); give --model the Hugging Face folder instead"
        )
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    kinds: list[int] = list(fields["tokenizer.ggml.token_type"])
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    added = [token for token, kind in zip(tokens, kinds, strict=True) if kind == USER_DEFINED_TOKEN]
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in added])
    if adds_begin_token(fields):
        begin = int(fields["tokenizer.ggml.bos_token_id"])
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[begin]} $A", special_tokens=[(tokens[begin], begin)]
        )
    return tokenizer


def adds_begin_token(fields: dict[str, Any]) -> bool:
    """Whether text begins with the begin token."""
    said = fields.get("tokenizer.ggml.add_bos_token")
    if said is not None:
        return bool(said)
    begins = fields["tokenizer.ggml.model"] == "llama" or _split(fields).begins
    return begins and fields.get("tokenizer.ggml.bos_token_id") is not None


def _split(fields: dict[str, Any]) -> Split:
    name = fields.get("tokenizer.ggml.pre", "default")
    if name not in SPLITS:
        raise ModelError(
            f"GGUF pre-tokenizer {name!r} is not supported; give --model the Hugging Face folder instead"
        )
    return SPLITS[name]


def _byte_level(fields: dict[str, Any]) -> Tokenizer:
    split = _split(fields)
    vocabulary = {token: index for index, token in enumerate(fields["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=split.whole_words))
    steps: list[pre_tokenizers.PreTokenizer] = []
    if split.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps.append(pre_tokenizers.Split(Regex(split.pattern), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if split.composed:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(fields: dict[str, Any]) -> Tokenizer:
    """SentencePiece merges the neighbours whose union has the best score: as merges in the order of their scores."""
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    kinds: list[int] = list(fields["tokenizer.ggml.token_type"])
    unknown = tokens[int(fields.get("tokenizer.ggml.unknown_token_id", 0))]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=_merges_by_score(tokens, kinds, fields["tokenizer.ggml.scores"]),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=BYTE_TOKEN in kinds,
        )
    )
    prefixed = bool(fields.get("tokenizer.ggml.add_space_prefix", True))
    spaces = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefixed else spaces
    steps: list[decoders.Decoder] = [
        decoders.Replace(SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if prefixed:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges_by_score(tokens: list[str], kinds: list[int], scores: list[float]) -> list[tuple[str, str]]:
    ids = {
        token: index
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (NORMAL_TOKEN, USER_DEFINED_TOKEN)
    }
    found: list[tuple[float, int, int]] = []
    for token, index in ids.items():
        for cut in range(1, len(token)):
            left, right = ids.get(token[:cut]), ids.get(token[cut:])
            if left is not None and right is not None:
                found.append((-float(scores[index]), left, right))
    return [(tokens[left], tokens[right]) for _, left, right in sorted(found)]
