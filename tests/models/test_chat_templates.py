"""Templates that use what those of Llama, Mistral and Qwen use give the prompts that `transformers` gives: tools, calls
and their results, thinking on and off, with and without a system message.
"""

from __future__ import annotations

from typing import Any

import pytest
from families import tiny
from gguf_files import TOKENS, byte_level, fields_of
from transformers import PreTrainedTokenizerFast

from strata.errors import RequestError
from strata.models import Tokenizer
from strata.models.config import parse_config
from strata.models.gguf_tokenizer import build_tokenizer

QWEN = """
{%- for tool in tools or [] %}{{ "tool " + tool | tojson + "\n" }}{% endfor %}
{%- set found = namespace(question=0) %}
{%- for message in messages[::-1] if message.role == "user" and message.content is string %}
    {%- if loop.first %}{% set found.question = messages.index(message) %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set text = message.content if message.content is string else "" %}
    {%- if "</think>" in text %}
        {%- set thought = text.split("</think>")[0].split("<think>")[-1].strip("\n") %}
        {%- set text = text.split("</think>")[-1].lstrip("\n") %}
        {%- if loop.index0 > found.question %}{{ "thought " + thought + "\n" }}{% endif %}
    {%- endif %}
    {%- if message.role != "tool" or loop.first or messages[loop.index0 - 1].role != "tool" %}
        {{- message.role + ":" }}
    {%- endif %}
    {{- text + "\n" }}
    {%- for call in message.tool_calls or [] %}
        {%- set call = call.function or call %}
        {{- call.name + (call.arguments if call.arguments is string else call.arguments | tojson) }}
    {%- endfor %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "assistant:" }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ "<think>\n\n</think>\n\n" }}{% endif %}
{%- endif %}
"""
LLAMA = """
{{- bos_token }}
{%- if date_string is not defined %}
    {%- set date_string = strftime_now("%Y") if strftime_now is defined else "unknown" %}
{%- endif %}
{%- if messages[0]["role"] == "system" %}
    {%- set told = messages[0]["content"] | trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- date_string ~ " " ~ told | default("nothing told") }}
{%- if tools is defined and tools is not none %}
    {%- for tool in tools %}{{ tool | tojson(indent=4) }}{% endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if "tool_calls" in message %}
        {%- if message.tool_calls | length != 1 %}{{ raise_exception("one tool call at a time") }}{% endif %}
        {%- for name, value in message.tool_calls[0].function.items() %}
            {{- name }}={{ value if value is string else value | tojson }}
        {%- endfor %}
    {%- elif message.role == "tool" and (message.content is mapping or message.content is iterable) %}
        {{- message.content | tojson }}
    {%- else %}{{ message["role"] + ": " + message["content"] | trim }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ "assistant:" }}{% endif %}
"""
MISTRAL = """
{%- set talk = messages | rejectattr("role", "equalto", "system") | list %}
{%- set asked = talk | selectattr("role", "equalto", "user") | list %}
{%- for message in talk if message.role != "tool" and message.tool_calls is not defined %}
    {%- if (message.role == "user") != (loop.index0 is divisibleby 2) %}
        {{- raise_exception("roles must alternate: " + message.role) }}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in talk %}
    {%- if message.role == "user" %}
        {%- if tools is not none and message == asked[-1] %}
            {%- for tool in tools %}
                {%- for key, value in tool.function.items() if key != "strict" %}
                    {{- key }}: {{ value if value is string else value | tojson }}
                    {%- if not loop.last %}, {% endif %}
                {%- endfor %}
            {%- endfor %}
        {%- endif %}
        {{- "[" + (messages[0].content + "\n\n" if loop.last and messages | length > talk | length else "") }}
        {{- message.content + "]" }}
    {%- elif message.tool_calls is defined %}
        {%- for call in message.tool_calls %}{{ (call.function | tojson)[:-1] + ", " + call.id + "}" }}{% endfor %}
    {%- else %}
        {{- message.content + eos_token if message.role == "assistant" else {"content": message.content} | tojson }}
    {%- endif %}
{%- endfor %}
"""
TEMPLATES = {"qwen": QWEN, "llama": LLAMA, "mistral": MISTRAL}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells <the> weather & 'more'",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
SYSTEM = {"role": "system", "content": " Be brief. "}
ASKED = {"role": "user", "content": "Wie ist das Wetter in Köln?"}
CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "abc123456",
            "type": "function",
            "function": {"name": "weather", "arguments": {"city": "Köln"}},
        }
    ],
}
RESULT = {"role": "tool", "content": "rain, 8 °C", "tool_call_id": "abc123456"}
THOUGHT = {"role": "assistant", "content": "<think>\nwet\n</think>\n\nIt rains."}
CHATS = {
    "a question": [ASKED],
    "system": [SYSTEM, ASKED],
    "turns": [SYSTEM, ASKED, THOUGHT, ASKED],
    "tools": [ASKED, CALLED, RESULT],
    "tools, later": [SYSTEM, ASKED, CALLED, RESULT, THOUGHT, ASKED],
}
SETTINGS = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}


def ours(template: str) -> Tokenizer:
    config = parse_config(tiny("qwen3", vocab_size=len(TOKENS)).config.to_dict())
    fast = build_tokenizer(fields_of(byte_level("qwen2")))
    return Tokenizer(fast, {**SETTINGS, "chat_template": template}, config)


@pytest.mark.parametrize("family", TEMPLATES)
@pytest.mark.parametrize("tools", [None, [TOOL]])
@pytest.mark.parametrize("thinking", [None, True, False])
def test_prompts_agree(family: str, tools: list[dict[str, Any]] | None, thinking: bool | None) -> None:
    tokenizer = ours(TEMPLATES[family])
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=build_tokenizer(fields_of(byte_level("qwen2"))),
        chat_template=TEMPLATES[family],
        bos_token="<|begin|>",
        eos_token="<|end|>",
    )
    variables = {} if thinking is None else {"enable_thinking": thinking}
    prompts = set()
    for messages in CHATS.values():
        expected = theirs.apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, tokenize=False, **variables
        )
        prompts.add(tokenizer.apply_chat_template(messages, tools=tools, **variables))
        assert expected in prompts
    assert len(prompts) == len(CHATS)
    if family == "qwen":
        assert all(("<think>\n\n</think>" in prompt) == (thinking is False) for prompt in prompts)


def test_a_template_s_own_refusals_are_the_client_s() -> None:
    with pytest.raises(RequestError, match="roles must alternate"):
        ours(MISTRAL).apply_chat_template([ASKED, ASKED])
    with pytest.raises(RequestError, match="one tool call at a time"):
        ours(LLAMA).apply_chat_template([ASKED, {**CALLED, "tool_calls": CALLED["tool_calls"] * 2}])
