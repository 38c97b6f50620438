"""The default model answers the same wherever its pages come from: computed, device, host, disk, after a restart."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
from engine_harness import BY_RULE, ask, wait_idle

from strata.config import StrataConfig
from strata.engine import Engine, ServedModel
from strata.models import LoadedModel, load_model

SHARED_DATA = Path(__file__).parents[2].parent / "shared" / "data"
ANSWER = 16
PAGE = 16


@pytest.fixture(scope="module")
def loaded() -> Iterator[LoadedModel]:
    """The real model in float32, on all cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(before, 2))
    yield load_model("default")
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def real(loaded: LoadedModel) -> ServedModel:
    return ServedModel(loaded.model, loaded.tokenizer, "default", "default model of the tests")


def documents() -> list[str]:
    """Long English texts: LooGLE's where the shared data are, and Python's own manual."""
    texts = []
    for path in sorted(SHARED_DATA.rglob("*.jsonl")) if SHARED_DATA.is_dir() else []:
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                record = json.loads(line)
                text = record.get("input") or record.get("context") or ""
                if isinstance(text, str) and len(text) > 8000:
                    texts.append(text)
    names = sorted(topics, key=lambda name: len(topics[name]), reverse=True)
    return [*(topics[name] for name in names[:30] if len(topics[name]) > 5000), *texts]


def prompts_of(loaded: LoadedModel, lengths: list[int]) -> list[list[int]]:
    """One prompt a length, each from another place of another text."""
    texts, prompts = documents(), []
    for index, length in enumerate(lengths):
        tokens: list[int] = []
        while len(tokens) < length:
            tokens += loaded.tokenizer.encode(texts[(index + len(tokens)) % len(texts)][: 6 * length])
        prompts.append(tokens[:length])
    return prompts


def engine(real: ServedModel, root: Path) -> Engine:
    config = StrataConfig.of(
        page_size=PAGE,
        device_memory="400MiB",
        host_memory="400MiB",
        disk_path=root,
        disk_capacity="4GiB",
        **BY_RULE,
    )
    return Engine(config, real)


def check_all_tiers(real: ServedModel, root: Path, prompts: list[list[int]]) -> None:
    colds: list[list[int]] = []
    with engine(real, root) as first:
        for prompt in prompts:
            cached = (len(prompt) - 1) // PAGE * PAGE
            fresh = len(prompt) - cached
            cold = ask(first, prompt, ANSWER, ignore_eos=True)
            assert cold.sources == (0, 0, 0, len(prompt)) and len(cold.tokens) == ANSWER
            found = {}
            for name, tiers in (("device", []), ("host", ["device"]), ("disk", ["device", "host"])):
                wait_idle(first)
                if tiers:
                    first.demote(tiers)
                answer = ask(first, prompt, ANSWER, ignore_eos=True)
                found[name] = answer.sources
                assert answer.tokens == cold.tokens, f"{len(prompt)} tokens from {name}"
            assert found == {
                "device": (cached, 0, 0, fresh),
                "host": (0, cached, 0, fresh),
                "disk": (0, 0, cached, fresh),
            }
            colds.append(cold.tokens)
        wait_idle(first)
        first.shutdown(drain_s=5.0, demote_s=30.0)
    with engine(real, root) as again:
        for prompt, tokens in zip(prompts, colds, strict=True):
            answer = ask(again, prompt, ANSWER, ignore_eos=True)
            assert answer.tokens == tokens
            assert answer.sources[2] == (len(prompt) - 1) // PAGE * PAGE
        wait_idle(again)


def test_three_prompts(real: ServedModel, loaded: LoadedModel, tmp_path: Path) -> None:
    check_all_tiers(real, tmp_path / "kv", prompts_of(loaded, [1000, 1041, 1600]))


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_twenty_prompts(real: ServedModel, loaded: LoadedModel, tmp_path: Path) -> None:
    lengths = [1000 + 157 * index for index in range(20)]
    check_all_tiers(real, tmp_path / "kv", prompts_of(loaded, lengths))
