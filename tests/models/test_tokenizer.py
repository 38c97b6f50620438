"""Token ids, chat prompts and streamed text equal those of `transformers` on the same folder."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest
from gguf_files import SPM_TOKENS, fields_of, sentence_piece
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoTokenizer

from strata.errors import ModelError, RequestError
from strata.models import LoadedModel, Tokenizer, load_config
from strata.models.config import ModelConfig, parse_config
from strata.models.gguf_tokenizer import build_tokenizer

TEXTS = [
    "",
    "Hello, world!",
    "  two  spaces\tand tabs\n\n\nand lines   ",
    "In 1984, 3.14159 and 2024-01-31: 1234567890",
    "Don't we'll I'm THEY'RE",
    "Zażółć gęślą jaźń \u2013 “quotes” … naïve café",
    "日本語のテキストと漢字、한국어, العربية, עברית, ไทย",
    "emoji 👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪 😀😃",
    "def f(x: int) -> int:\n    return x ** 2  # comment\n\tif x != 0: pass",
    "<|im_start|>user\nhi<|im_end|>\n",
    "\u0000\u0001 control \u200b zero width \ufffd replacement",
    "½ ² ٣ Ⅷ \uff11\uff12",
]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2+2? <b>&</b> 'quoted' \"too\""},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "Grüße 👋"},
]


@pytest.fixture(scope="module")
def tokenizer(default_model: LoadedModel) -> Tokenizer:
    return default_model.tokenizer


@pytest.mark.parametrize("text", TEXTS)
def test_ids_agree(tokenizer: Tokenizer, default_folder: Path, text: str) -> None:
    theirs = AutoTokenizer.from_pretrained(default_folder)
    ids = tokenizer.encode(text)
    assert ids == theirs.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("text", TEXTS)
def test_texts_of_tokens(tokenizer: Tokenizer, text: str) -> None:
    if text.isascii():
        assert "".join(map(tokenizer.token_text, tokenizer.encode(text))) == text
    for token in tokenizer.encode(text):
        assert tokenizer.token_text(token) == tokenizer.decode([token], skip_special_tokens=False)


def test_a_space_at_the_beginning_is_no_loss() -> None:
    vocabulary = {"▁a": 0, "b": 1, "▁": 2, "<unk>": 3}
    fast = FastTokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    fast.pre_tokenizer, fast.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokens = Tokenizer(fast, {}, small_config())
    assert tokens.decode([0, 1, 0]) == "ab a"
    assert [tokens.token_text(token) for token in (0, 1, 2)] == [" a", "b", " "]


def test_half_a_surrogate_pair_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="surrogate"):
        tokenizer.encode("caf\udce9")


def test_digits_are_single_tokens(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode("1234567890")) == 10


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("messages", [CHAT, CHAT[1:]])
def test_chat_prompts_agree(
    tokenizer: Tokenizer, default_folder: Path, messages: list[dict[str, str]], prompt: bool
) -> None:
    theirs = AutoTokenizer.from_pretrained(default_folder)
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=prompt)
    assert text == theirs.apply_chat_template(messages, add_generation_prompt=prompt, tokenize=False)


def test_end_tokens(tokenizer: Tokenizer, default_model: LoadedModel) -> None:
    end = tokenizer.encode("<|im_end|>")
    assert len(end) == 1
    assert tokenizer.eos_token_ids == frozenset(end)
    assert default_model.config.vocab_size == tokenizer.vocab_size


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=60))
def test_streamed_text_is_the_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    stream = tokenizer.detokenizer(skip_special_tokens=False)
    pieces = [stream.push(token) for token in ids]
    # A vocabulary may lack bytes that its training text never held, so the decoding is the measure.
    expected = tokenizer.decode(ids, skip_special_tokens=False)
    assert "".join(pieces) + stream.finish() == expected
    assert all(expected.startswith("".join(pieces[:count])) for count in range(len(pieces) + 1))


@settings(max_examples=200, deadline=None)
@given(
    ids=st.lists(st.integers(0, len(SPM_TOKENS)), max_size=40), skip=st.booleans(), text=st.text(max_size=20)
)
def test_sentence_piece_streams_to_its_decoding(ids: list[int], skip: bool, text: str) -> None:
    tokenizer = Tokenizer(build_tokenizer(fields_of(sentence_piece())), {}, small_config())
    for tokens in (ids, tokenizer.encode(text)):
        stream = tokenizer.detokenizer(skip_special_tokens=skip)
        streamed = "".join([stream.push(token) for token in tokens]) + stream.finish()
        assert streamed == tokenizer.decode(tokens, skip_special_tokens=skip)
    assert streamed == text.replace("▁", " ") or not skip


def test_an_answer_goes_on_where_the_prompts_text_ends() -> None:
    """SentencePiece drops the space that begins a text: "the" and "the" must not come to "thethe"."""
    tokenizer = Tokenizer(build_tokenizer(fields_of(sentence_piece())), {}, small_config())
    prompt, word = tokenizer.encode("the"), tokenizer.encode("the", add_special_tokens=False)
    begin = prompt[: len(prompt) - len(word)]

    def shown(before: list[int]) -> str:
        stream = tokenizer.detokenizer(before=before)
        return "".join(map(stream.push, word)) + stream.finish()

    assert begin and (shown(prompt), shown(begin), shown([])) == (" the", "the", "the")


def test_a_decoder_that_looks_ahead_is_refused() -> None:
    fast = FastTokenizer(models.BPE(vocab={"a": 0, "a</w>": 1}, merges=[]))
    fast.decoder = decoders.Sequence([decoders.BPEDecoder(suffix="</w>")])
    with pytest.raises(ModelError, match="BPEDecoder writes a token by what follows it"):
        Tokenizer(fast, {}, small_config())


def test_characters_beside_bytes_that_are_none_stay_what_they_are() -> None:
    """The decoder of SentencePiece gives up all bytes of a row for one, also for one that is still to come."""
    fast = build_tokenizer(fields_of(sentence_piece()))
    tokenizer = Tokenizer(fast, {}, small_config())
    ids = tokenizer.encode("漢字")[:-1]
    assert fast.decode(ids) == "\ufffd" * 5
    assert tokenizer.decode(ids) == "漢\ufffd"
    stream = tokenizer.detokenizer()
    assert "".join(map(stream.push, tokenizer.encode("😀😀漢字"))) == "😀😀漢字"


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ids=st.lists(st.integers(0, 49151) | st.integers(0, 300), max_size=40), skip=st.booleans())
def test_any_ids_stream_to_their_decoding(tokenizer: Tokenizer, ids: list[int], skip: bool) -> None:
    stream = tokenizer.detokenizer(skip_special_tokens=skip)
    streamed = "".join([stream.push(token) for token in ids]) + stream.finish()
    assert streamed == tokenizer.decode(ids, skip_special_tokens=skip)


def small_config() -> ModelConfig:
    return parse_config(
        {
            "model_type": "llama",
            "vocab_size": 49152,
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
        }
    )


@pytest.fixture(scope="module")
def fast(default_folder: Path) -> FastTokenizer:
    return FastTokenizer.from_file(str(default_folder / "tokenizer.json"))


def test_template_helpers_and_variables(fast: FastTokenizer) -> None:
    template = (
        "{{ bos_token }}{% for m in messages %}\n    {% if m.role == 'stop' %}{% break %}{% endif %}\n"
        "{{ m | tojson }}{% endfor %}{{ strftime_now('%%') }}{{ flavour }}"
    )
    own = Tokenizer(fast, {"chat_template": template, "bos_token": {"content": "<s>"}}, small_config())
    text = own.apply_chat_template([{"role": "user", "content": "<é>"}, {"role": "stop"}], flavour="x")
    assert text == '<s>{"role": "user", "content": "<é>"}%x'


LLAMA_3 = (
    "{% if not date_string is defined %}{% if strftime_now is defined %}"
    "{% set date_string = strftime_now('%d %b %Y') %}{% else %}{% set date_string = '26 Jul 2024' %}{% endif %}"
    "{% endif %}Today Date: {{ date_string }}\n{{ messages[0].content }}"
)


def test_a_template_that_writes_the_date_is_found_and_its_date_can_be_fixed(fast: FastTokenizer) -> None:
    dated = Tokenizer(fast, {"chat_template": LLAMA_3}, small_config())
    assert dated.template_writes_date
    today = dated.apply_chat_template([{"role": "user", "content": "Hello"}])
    assert today == f"Today Date: {date.today():%d %b %Y}\nHello"
    dated.fix_date(date(2024, 7, 26))
    assert dated.apply_chat_template([{"role": "user", "content": "x"}]) == "Today Date: 26 Jul 2024\nx"
    dated.fix_date(None)
    assert dated.apply_chat_template([{"role": "user", "content": "Hello"}]) == today


@pytest.mark.parametrize(
    "template", ["{{ messages[0].content }}", "{{ raise_exception('no') }}", "{{ strftime_now('%%') }}", None]
)
def test_other_templates_write_no_date(fast: FastTokenizer, template: str | None) -> None:
    assert not Tokenizer(fast, {"chat_template": template}, small_config()).template_writes_date


def test_template_errors_are_the_clients(fast: FastTokenizer) -> None:
    refusing = Tokenizer(
        fast, {"chat_template": "{{ raise_exception('roles must alternate') }}"}, small_config()
    )
    with pytest.raises(RequestError, match="roles must alternate"):
        refusing.apply_chat_template([])
    with pytest.raises(RequestError, match="no chat template"):
        Tokenizer(fast, {}, small_config()).apply_chat_template([])
    unsafe = Tokenizer(fast, {"chat_template": "{{ messages.append(1) }}"}, small_config())
    with pytest.raises(RequestError):
        unsafe.apply_chat_template([])
    for careless in ("{{ messages[0]['content'] / 0 }}", "{{ 1 / 0 }}", "{{ range(10 ** 9) }}"):
        with pytest.raises(RequestError):
            Tokenizer(fast, {"chat_template": careless}, small_config()).apply_chat_template([{"content": 1}])


def test_what_a_template_does_with_tools(fast: FastTokenizer) -> None:
    def of(template: str) -> tuple[bool, bool]:
        own = Tokenizer(fast, {"chat_template": template}, small_config())
        return own.template_takes_tools, own.template_marks_tool_calls

    assert of("{{ messages }}") == (False, False)
    assert of("{% if tools %}{{ tools | tojson }}{% endif %}") == (True, False)
    assert of("{% for tool in tools %}<tool_call>{{ tool }}{% endfor %}") == (True, True)
    plain = Tokenizer(fast, {}, small_config())
    assert (plain.template_takes_tools, plain.template_marks_tool_calls) == (False, False)


def test_malformed_template_and_foreign_vocabulary_are_refused(fast: FastTokenizer) -> None:
    with pytest.raises(ModelError, match="malformed"):
        Tokenizer(fast, {"chat_template": "{% for %}"}, small_config())
    config = small_config()
    with pytest.raises(ModelError, match="vocab_size is 100"):
        Tokenizer(fast, {}, ModelConfig(**{**vars(config), "vocab_size": 100}))


def test_config_of_the_default_folder(default_folder: Path) -> None:
    config = load_config(default_folder)
    assert (config.layers, config.heads, config.kv_heads, config.context_length) == (30, 9, 3, 8192)
    assert config.rms_norm_eps == 1e-5
