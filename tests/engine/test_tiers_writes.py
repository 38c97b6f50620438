"""What is written down the tiers, when, and how much: nothing is lost under `back`, nothing of those who opted out is
kept, and no day's writes pass the limit.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from engine_harness import Answer, MakeEngine, Sizes, ask, assert_exact, eventually, nonzero, read, wait_idle
from pressure import Load, assert_clean, run_clients

from strata.engine import Engine, GenerationRequest, SamplingParams, ServedModel

PAGE = 4
TOKENS = 40
PAGES = TOKENS // PAGE
PROMPTS = [
    [(11 * index + 5 * place + place * place) % 97 for place in range(TOKENS + 1)] for index in range(8)
]
ALWAYS = {"load_policy": "always", "prefetch_policy": "wait"}


def ask_unkept(engine: Engine, prompt: list[int], max_tokens: int = 8) -> Answer:
    """One request that asks for nothing of it to be kept."""
    request = GenerationRequest(prompt, SamplingParams(max_tokens=max_tokens), cache_write=False)
    return read(engine.submit(request))


def test_back_writes_nothing_before_it_has_to(make_engine: MakeEngine) -> None:
    engine = make_engine(write_policy="back", disk_write_policy="back")
    for prompt in PROMPTS:
        ask(engine, prompt, 1)
    wait_idle(engine)
    stats = engine.stats()
    assert stats["device_resident_pages"] == len(PROMPTS) * PAGES
    assert (stats["backup_pages"], stats["spill_pages"]) == (0, 0)


@pytest.mark.parametrize(
    ("sizes", "source"),
    [
        (Sizes(PAGE, 26, 256, 0), 1),
        (Sizes(PAGE, 26, 14, 4 << 20), 2),
        (Sizes(PAGE, 26, 0, 4 << 20), 2),
    ],
    ids=["to the host", "through a small host to disk", "through staging to disk"],
)
def test_back_loses_nothing(make_engine: MakeEngine, served: ServedModel, sizes: Sizes, source: int) -> None:
    """Eight prompts go through a device with room for two; each is found whole afterwards, and comes back."""
    engine = make_engine(sizes=sizes, write_policy="back", disk_write_policy="back", **ALWAYS)
    before = [ask(engine, prompt, 2) for prompt in PROMPTS]
    wait_idle(engine)
    stats = engine.stats()
    assert stats["device_evicted_pages"] >= (len(PROMPTS) - 3) * PAGES
    assert stats["unsaved_pages_device"] == stats["unsaved_pages_host"] == 0, nonzero(engine)
    for prompt, old in zip(PROMPTS, before, strict=True):
        # So that there is room to bring them up to.
        engine.demote(["device", "host"] if sizes.host and sizes.disk_bytes else ["device"])
        answer = ask(engine, prompt, 2)
        assert_exact(served.model, prompt, answer)
        assert answer.tokens == old.tokens
        assert answer.sources[3] == 1, f"{answer.sources}: pages were lost"
        wait_idle(engine)
    stats = engine.stats()
    name = ("device", "host", "disk")[source]
    assert stats[f"prompt_tokens_{name}"] >= (len(PROMPTS) - 3) * TOKENS


def test_back_off_loses_what_is_evicted(make_engine: MakeEngine) -> None:
    """The same prompts without a tier to go to: the test above would see it."""
    engine = make_engine(sizes=Sizes(PAGE, 26, 0, 0), write_policy="back")
    for prompt in PROMPTS * 2:
        ask(engine, prompt, 2)
    assert engine.stats()["prompt_tokens_computed"] == 2 * sum(map(len, PROMPTS))


@pytest.mark.parametrize("write", ["back", "selective"])
def test_preemption_backs_up(make_engine: MakeEngine, served: ServedModel, write: str) -> None:
    """Two answers that do not fit together: the younger's pages wait on the host and come back from there."""
    engine = make_engine(
        sizes=Sizes(PAGE, 30, 200, 0), write_policy=write, selective_accesses=50, load_policy="always"
    )
    sampling = SamplingParams(max_tokens=70)
    streams = [engine.submit(GenerationRequest(prompt[:20], sampling)) for prompt in PROMPTS[:2]]
    answers = [read(stream) for stream in streams]
    for prompt, answer in zip(PROMPTS, answers, strict=False):
        assert len(answer.tokens) == 70
        assert_exact(served.model, prompt[:20], answer)
    wait_idle(engine)
    stats = engine.stats()
    assert stats["preemptions"] > 0
    assert stats["backup_pages"] > 0 and stats["load_pages"] > 0, nonzero(engine)
    assert sum(answer.last.usage.preemptions for answer in answers) == stats["preemptions"]


def holds_tokens(root: Path, tokens: list[int]) -> bool:
    """Whether any file under `root` has these tokens in its bytes."""
    wanted = np.asarray(tokens, dtype="<u4").tobytes()
    return any(wanted in path.read_bytes() for path in root.rglob("*") if path.is_file())


def test_without_cache_write_nothing_stays(
    make_engine: MakeEngine, served: ServedModel, tmp_path: Path
) -> None:
    engine = make_engine(**ALWAYS)
    secret, public = PROMPTS[0], PROMPTS[1]
    for _ in range(2):
        answer = ask_unkept(engine, secret)
        assert_exact(served.model, secret, answer)
        assert answer.sources == (0, 0, 0, TOKENS + 1), "not even for itself"
        wait_idle(engine)
    stats = engine.stats()
    assert [stats[f"{tier}_resident_pages"] for tier in ("device", "host", "disk")] == [0, 0, 0]
    # What is cached already is used either way.
    ask(engine, public, 1)
    wait_idle(engine)
    longer = public[:TOKENS] + secret
    answer = ask_unkept(engine, longer)
    assert_exact(served.model, longer, answer)
    assert answer.sources == (TOKENS, 0, 0, TOKENS + 1)
    wait_idle(engine)
    engine.demote(["device", "host"])
    assert engine.stats()["disk_resident_pages"] == PAGES
    assert ask_unkept(engine, public, 1).sources == (0, 0, TOKENS, 1), "reading is no writing"
    engine.shutdown(drain_s=1.0, demote_s=5.0)
    assert holds_tokens(tmp_path / "kv", public[:PAGE]), "the search below finds what there is"
    assert not holds_tokens(tmp_path / "kv", secret[:PAGE])


def test_without_cache_write_nothing_is_written_even_when_preempted(
    make_engine: MakeEngine, served: ServedModel, tmp_path: Path
) -> None:
    engine = make_engine(sizes=Sizes(PAGE, 30, 200, 4 << 20), write_policy="through")
    sampling = SamplingParams(max_tokens=70)
    streams = [
        engine.submit(GenerationRequest(prompt[:20], sampling, cache_write=False)) for prompt in PROMPTS[:3]
    ]
    for prompt, answer in zip(PROMPTS, [read(stream) for stream in streams], strict=False):
        assert_exact(served.model, prompt[:20], answer)
    wait_idle(engine)
    stats = engine.stats()
    assert stats["preemptions"] > 0
    assert (stats["backup_pages"], stats["spill_pages"], stats["device_resident_pages"]) == (0, 0, 0)
    engine.shutdown(drain_s=1.0, demote_s=5.0)
    assert not any(holds_tokens(tmp_path / "kv", prompt[:PAGE]) for prompt in PROMPTS[:3])


@pytest.mark.parametrize("host", [120, 0], ids=["from the host", "through staging"])
@pytest.mark.parametrize("disk_write", ["through", "back"])
def test_no_more_is_written_than_a_day_allows(
    make_engine: MakeEngine, served: ServedModel, host: int, disk_write: str
) -> None:
    limit = 200 << 10
    engine = make_engine(
        sizes=Sizes(PAGE, 80, host, 4 << 20),
        disk_bytes_per_day=limit,
        write_policy="through",
        disk_write_policy=disk_write,
    )
    load = Load(31, clients=16, documents=6, document_tokens=(40, 80), turns=2)
    assert_clean(engine, run_clients(engine, served.model, load))
    assert eventually(lambda: engine.stats()["transfers_in_flight"] == 0)
    stats = engine.stats()
    assert stats["disk_over_budget_pages"] > 0
    assert 0 < stats["spill_bytes"] <= stats["disk_bytes_written"] <= limit, nonzero(engine)
