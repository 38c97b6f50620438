"""Ten turns of a chat, on a template of each known kind: every turn reuses what came before it, up to the first token
that the template itself wrote differently this time.

What a template changes between two turns is not the cache's to keep: Qwen's takes the empty thought that it opened
an answer with out of the history, Mistral's moves the system prompt to the last question. The templates are our own, in
the manner of those models.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tiny_folder import make_folder
from tiny_server import TinyServer

from strata.engine import GenerationRequest, RequestStream
from strata.engine.api import Chunk

TURNS = 10
SYSTEM = {"role": "system", "content": "You are a helpful assistant that knows what a cache is."}

CHATML = """
{%- for m in messages -%}
{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""
LLAMA_3 = """
{{- '<|begin_of_text|>' -}}
{%- for m in messages -%}
{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + (m.content | trim) + '<|eot_id|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif -%}
"""
QWEN = """
{%- for m in messages -%}
{{ '<|im_start|>' + m.role + '\\n' + m.content.split('</think>')[-1].lstrip('\\n') + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' }}{%- endif -%}
"""
MISTRAL = """
{{- '<s>' -}}
{%- set system = messages[0].content if messages[0].role == 'system' else '' -%}
{%- for m in messages if m.role != 'system' -%}
{%- if m.role == 'user' -%}
{{ '[INST]' + (system + '\\n\\n' if loop.last and system else '') + m.content + '[/INST]' }}
{%- else -%}{{ m.content + '</s>' }}{%- endif -%}
{%- endfor -%}
"""


@dataclass(frozen=True)
class Style:
    """One kind of template, with its special tokens (the end of an answer first), and what it does to the history."""

    template: str
    special: tuple[str, ...]
    changes: bool


STYLES = {
    "smollm2": Style(CHATML, ("<|im_end|>", "<|im_start|>"), changes=False),
    "llama-3": Style(
        LLAMA_3,
        ("<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
        changes=False,
    ),
    "qwen": Style(QWEN, ("<|im_end|>", "<|im_start|>", "<think>", "</think>"), changes=True),
    "mistral": Style(MISTRAL, ("</s>", "<s>", "[INST]", "[/INST]"), changes=True),
}


class Recorder:
    """What the engine was asked and what it generated, as token ids, beside the streams that the server reads."""

    def __init__(self, server: TinyServer) -> None:
        self.prompts: list[list[int]] = []
        self.answers: list[list[int]] = []
        self._submit = server.engine.submit
        server.engine.submit = self._recorded  # type: ignore[method-assign]

    def _recorded(self, request: GenerationRequest) -> RequestStream:
        stream: Any = self._submit(request)
        answer: list[int] = []
        self.prompts.append(list(request.prompt_token_ids))
        self.answers.append(answer)
        put = stream.put

        def recorded(item: Any) -> None:
            if isinstance(item, Chunk):
                answer.extend(item.token_ids)
            put(item)

        stream.put = recorded
        return stream  # type: ignore[no-any-return]


def common(one: Sequence[int], two: Sequence[int]) -> int:
    """Tokens that two sequences begin with alike."""
    return next(
        (index for index, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two))
    )


@pytest.fixture(params=[1, 16], ids=["page 1", "page 16"])
def page_size(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(params=list(STYLES))
def style(request: pytest.FixtureRequest) -> Style:
    return STYLES[request.param]


@pytest.fixture
def server(tmp_path: Path, style: Style, page_size: int) -> Iterator[TinyServer]:
    folder = make_folder(tmp_path / "model", style.template, style.special)
    server = TinyServer(folder, page_size=page_size)
    yield server
    server.stop()


def test_ten_turns_reuse_all_up_to_what_the_template_changed(
    server: TinyServer, style: Style, page_size: int
) -> None:
    recorder = Recorder(server)
    messages: list[dict[str, str]] = [SYSTEM]
    kept: list[list[int]] = []
    changed: list[bool] = []
    for turn in range(TURNS):
        messages.append({"role": "user", "content": f"Question {turn}: what is a page of tier {turn}?"})
        body = {"messages": messages, "temperature": 0, "max_tokens": 12}
        answer = server.http.post("/v1/chat/completions", json=body).raise_for_status().json()
        server.wait_idle()
        prompt, usage = recorder.prompts[-1], answer["usage"]
        alike = max((common(prompt, former) for former in kept), default=0)
        # The last token of a prompt is always computed, for its logits; only whole pages come back.
        usable = min(alike, len(prompt) - 1) // page_size * page_size
        assert usage["prompt_tokens"] == len(prompt)
        assert usage["prompt_tokens_details"]["cached_tokens"] == usable, f"turn {turn}: {alike} alike"
        assert usage["strata"]["computed"] == len(prompt) - usable
        # The KV of the last token that was generated was never computed.
        kept.append(prompt + recorder.answers[-1][:-1])
        if turn:
            changed.append(alike < len(recorder.prompts[-2]))
        messages.append(answer["choices"][0]["message"])
    # A template that leaves the history alone has every former prompt come back whole, each time.
    assert changed == [style.changes] * (TURNS - 1)
