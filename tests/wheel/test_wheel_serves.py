"""The wheel alone, installed beside what it asks for and nothing else: it imports, runs its commands and serves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from bare_environment import ROOT, BareEnvironment, built_wheel
from tiny_folder import make_folder

from strata.device.kernel_source import bundle

pytestmark = pytest.mark.wheel

TEMPLATE = "{%- for m in messages -%}{{ m.role + ': ' + m.content + '\\n' }}{%- endfor -%}"
QUESTION = "What is a cache, and why does a document come back sooner the second time? " * 8
ANSWER_TOKENS = 24
# No measured time decides where a prompt's tokens come from.
FLAGS = ("--load-policy", "always", "--prefetch-policy", "wait", "--threads", "1")
FLAGS += ("--device-memory", "64MiB", "--host-memory", "64MiB", "--disk-capacity", "256MiB")

IMPORT_ALL = """
import importlib, json, pkgutil, strata
names = [one.name for one in pkgutil.walk_packages(strata.__path__, "strata.")]
print(json.dumps({name: importlib.import_module(name).__file__ for name in names}))
"""
SOURCE = "from strata.device.kernel_source import kernel_source; print(kernel_source(), end='')"


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> BareEnvironment:
    return BareEnvironment(tmp_path_factory.mktemp("bare"), built_wheel())


def ask(address: str) -> tuple[str, int, dict[str, Any]]:
    """A streamed answer: its text, the number of its chunks, and its usage."""
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    with httpx.stream("POST", f"{address}/v1/chat/completions", json=body, timeout=60) as answer:
        assert answer.status_code == 200, answer.read()
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    chunks = [json.loads(line) for line in lines]
    texts = [chunk["choices"][0]["delta"].get("content") for chunk in chunks if chunk["choices"]]
    return "".join(filter(None, texts)), len(chunks), chunks[-1]["usage"]


def test_pip_finds_every_requirement_met(bare: BareEnvironment) -> None:
    assert "No broken requirements found" in bare.pip("check")


def test_every_module_imports_from_the_wheel_with_what_it_declares(bare: BareEnvironment) -> None:
    files = json.loads(bare.python("-c", IMPORT_ALL))
    sources = [path.relative_to(ROOT / "python") for path in (ROOT / "python/strata").rglob("*.py")]
    modules = {".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in sources}
    assert files.keys() == modules - {"strata"} | {"strata._core"}
    assert [name for name, file in files.items() if not Path(file).is_relative_to(bare.prefix)] == []


def test_the_commands_run(bare: BareEnvironment) -> None:
    assert "usage: strata COMMAND" in bare.program("strata", "--help")
    found = {one["name"]: one for one in json.loads(bare.program("strata", "doctor", "--json"))["findings"]}
    assert found["io_uring"]["status"] and found["disk folder"]["status"] == "ok"
    assert bare.python("-c", SOURCE) == bundle()
    shown = bare.program("strata", "simulate", "--hardware", "h200", "--model", "qwen2.5-14b", "--help")
    assert "--workload" in shown


def test_it_answers_in_a_stream_and_again_from_disk_after_a_restart(bare: BareEnvironment) -> None:
    model = make_folder(bare.home / "model", TEMPLATE)
    flags = ("--model", str(model), "--disk-path", str(bare.home / "kv"), *FLAGS)
    with bare.server(*flags) as address:
        page = httpx.get(f"{address}/", timeout=10)
        assert page.status_code == 200 and "<title>" in page.text
        for file in (ROOT / "python/strata/serve/page").iterdir():
            assert httpx.get(f"{address}/page/{file.name}", timeout=10).content == file.read_bytes()
        text, chunks, usage = ask(address)
        assert chunks > ANSWER_TOKENS / 2, "it came in one piece"
        assert usage["completion_tokens"] == ANSWER_TOKENS
        assert usage["strata"]["computed"] == usage["prompt_tokens"]
        assert ask(address)[2]["strata"]["device"] > 0
    with bare.server(*flags) as address:
        again, _, usage = ask(address)
        assert again == text
        assert usage["strata"]["disk"] > usage["prompt_tokens"] / 2
