"""The disk is never trusted: whatever happened to its files, clients get the right tokens and no error."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from engine_harness import Answer, MakeEngine, Sizes, ask, assert_exact, tiny_served, wait_idle

from strata._core import disk_usage
from strata.engine import ServedModel
from strata.models import tiny_random_model

PROMPTS = [[(7 * index + 3 * place) % 97 for place in range(41)] for index in range(6)]
BLOCK = 4096
"""Also the bytes before the first header."""
HEADER_SLOT = 256


def fill(make_engine: MakeEngine, **arguments: object) -> list[Answer]:
    """Answers all prompts, and leaves their pages on disk alone."""
    engine = make_engine(**arguments)
    answers = [ask(engine, prompt) for prompt in PROMPTS]
    wait_idle(engine)
    engine.shutdown(drain_s=5.0, demote_s=5.0)
    return answers


def segments(root: Path, kind: str) -> list[Path]:
    """The files of payloads (`kv`) or of headers (`kh`)."""
    found = sorted(root.glob(f"*/segment-*.{kind}"))
    assert found, "nothing was written"
    return found


def ask_again(make_engine: MakeEngine, served: ServedModel, before: list[Answer], **arguments: object):
    """All prompts on a fresh engine over the same root. Returns the engine and where their tokens came from."""
    engine = make_engine(**arguments)
    answers = [ask(engine, prompt) for prompt in PROMPTS]
    for prompt, answer, old in zip(PROMPTS, answers, before, strict=True):
        assert answer.reason == "length"
        assert answer.tokens == old.tokens
        assert_exact(served.model, prompt, answer)
    wait_idle(engine)
    return engine, [answer.sources for answer in answers]


def test_a_restart_is_warm(make_engine: MakeEngine, served: ServedModel) -> None:
    _, sources = ask_again(make_engine, served, fill(make_engine))
    assert sources == [(0, 0, 40, 1)] * len(PROMPTS)


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def payload_offsets(path: Path) -> list[int]:
    """Offsets of the payloads that were written, where each takes one block."""
    data = path.read_bytes()
    return [start for start in range(0, len(data), BLOCK) if any(data[start : start + BLOCK])]


def test_a_flipped_bit_in_a_payload(make_engine: MakeEngine, served: ServedModel, tmp_path: Path) -> None:
    before = fill(make_engine)
    for path in segments(tmp_path / "kv", "kv"):
        for offset in payload_offsets(path)[::7]:
            flip(path, offset + 100)
    engine, sources = ask_again(make_engine, served, before)
    assert engine.stats()["corrupt_records"] > 0
    assert engine.stats()["disk_checksum_failures"] > 0
    assert sum(disk for _, _, disk, _ in sources) < 40 * len(PROMPTS)
    assert engine.health().ok


def test_a_flipped_bit_in_every_payload(make_engine: MakeEngine, served: ServedModel, tmp_path: Path) -> None:
    before = fill(make_engine)
    for path in segments(tmp_path / "kv", "kv"):
        for offset in payload_offsets(path):
            flip(path, offset + 5)
    engine, sources = ask_again(make_engine, served, before)
    assert sources == [(0, 0, 0, 41)] * len(PROMPTS)
    assert engine.stats()["corrupt_records"] >= len(PROMPTS)
    # The tier is in service: what was computed again comes back from it.
    engine.demote(["device", "host"])
    assert ask(engine, PROMPTS[0]).sources == (0, 0, 40, 1)


def test_a_flipped_bit_in_headers(make_engine: MakeEngine, served: ServedModel, tmp_path: Path) -> None:
    before = fill(make_engine)
    damaged = 0
    for path in segments(tmp_path / "kv", "kh"):
        data = path.read_bytes()
        for offset in range(BLOCK, len(data), HEADER_SLOT):
            if data[offset : offset + 8] == b"STRATAKV" and (offset // HEADER_SLOT) % 5 == 0:
                flip(path, offset + 190)
                damaged += 1
    assert damaged
    engine, sources = ask_again(make_engine, served, before)
    assert engine._runtime.recovered[1] == damaged
    assert sum(disk for _, _, disk, _ in sources) < 40 * len(PROMPTS)


@pytest.mark.parametrize("kind", ["kv", "kh"])
@pytest.mark.parametrize("kept", [0, 100, 4096, 5000, 20000])
def test_truncated_segments(
    make_engine: MakeEngine, served: ServedModel, tmp_path: Path, kind: str, kept: int
) -> None:
    before = fill(make_engine)
    for path in segments(tmp_path / "kv", kind):
        os.truncate(path, kept)
    engine, _ = ask_again(make_engine, served, before)
    assert engine.tiers()[2].enabled and engine.health().ok


@pytest.mark.parametrize("kind", ["kv", "kh"])
def test_a_missing_file(make_engine: MakeEngine, served: ServedModel, tmp_path: Path, kind: str) -> None:
    small = Sizes(disk_bytes=1 << 20)
    before = fill(make_engine, sizes=small)
    paths = segments(tmp_path / "kv", kind)
    paths[0].unlink()
    engine, _ = ask_again(make_engine, served, before, sizes=small)
    assert engine.health().ok


def test_segments_truncated_under_a_living_engine(
    make_engine: MakeEngine, served: ServedModel, tmp_path: Path
) -> None:
    engine = make_engine()
    before = [ask(engine, prompt) for prompt in PROMPTS]
    engine.demote(["device", "host"])
    for path in segments(tmp_path / "kv", "kv"):
        os.truncate(path, 2 * BLOCK)
    for prompt, old in zip(PROMPTS, before, strict=True):
        answer = ask(engine, prompt)
        assert answer.tokens == old.tokens and answer.reason == "length"
    wait_idle(engine)
    stats = engine.stats()
    assert stats["corrupt_records"] + stats["prefetch_failed"] > 0


def test_pages_of_other_weights_do_not_match(make_engine: MakeEngine, served: ServedModel) -> None:
    fill(make_engine, served=tiny_served(seed=1))
    engine = make_engine()
    for prompt in PROMPTS:
        answer = ask(engine, prompt)
        assert_exact(served.model, prompt, answer)
        assert answer.sources == (0, 0, 0, 41)


def test_pages_of_another_dtype_do_not_match(make_engine: MakeEngine, served: ServedModel) -> None:
    narrow = tiny_served(model=tiny_random_model(0, dtype=torch.float32))
    fill(make_engine, served=narrow)
    engine = make_engine()
    answer = ask(engine, PROMPTS[0])
    assert_exact(served.model, PROMPTS[0], answer)
    assert answer.sources == (0, 0, 0, 41)


def test_pages_of_another_page_size_do_not_match(make_engine: MakeEngine, served: ServedModel) -> None:
    fill(make_engine)
    engine = make_engine(sizes=Sizes(page=8))
    answer = ask(engine, PROMPTS[0])
    assert_exact(served.model, PROMPTS[0], answer)
    assert answer.sources == (0, 0, 0, 41)


def test_two_models_share_one_cap(make_engine: MakeEngine, tmp_path: Path) -> None:
    cap = 512 << 10
    for seed in (0, 1, 0, 2):
        engine = make_engine(served=tiny_served(seed), sizes=Sizes(device=40, host=40, disk_bytes=cap))
        for index in range(30):
            ask(engine, [(index * 11 + place * 5) % 97 for place in range(40)], max_tokens=2)
            assert disk_usage(tmp_path / "kv") <= cap
        wait_idle(engine)
        assert engine.stats()["disk_evicted_pages"] + engine.stats()["spill_skipped_pages"] > 0
        engine.shutdown(drain_s=1.0, demote_s=5.0)
        assert disk_usage(tmp_path / "kv") <= cap


def test_a_second_engine_on_the_root_serves_without_disk(
    make_engine: MakeEngine, served: ServedModel
) -> None:
    first = make_engine()
    second = make_engine()
    report = second.tiers()[2]
    assert not report.enabled and "in use by" in (report.off_reason or "")
    assert second.health().ok and any("in use by" in problem for problem in second.health().problems)
    for engine in (first, second, second):
        assert_exact(served.model, PROMPTS[0], ask(engine, PROMPTS[0]))
    assert ask(second, PROMPTS[0]).sources == (40, 0, 0, 1)


CHILD = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from engine_harness import Sizes, ask, engine_of
engine = engine_of(Path(sys.argv[2]))
index = 0
while True:
    prompt = [(7 * index + 3 * place) % 97 for place in range(41)]
    ask(engine, prompt)
    print(index, int(engine.stats()["spill_pages"]), flush=True)
    index += 1
"""


def test_kill_9_amid_spills(make_engine: MakeEngine, served: ServedModel, tmp_path: Path) -> None:
    root = tmp_path / "kv"
    command = [sys.executable, "-c", CHILD, str(Path(__file__).parent), str(root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        try:
            for _ in range(len(PROMPTS) + 1):
                assert child.stdout.readline()
        finally:
            child.send_signal(signal.SIGKILL)
        child.wait(timeout=30)
    engine = make_engine()
    recovered, damaged = engine._runtime.recovered
    assert recovered > 0
    assert damaged <= 4, "at most the records that were being written"
    hit = 0
    for prompt in PROMPTS:
        answer = ask(engine, prompt)
        assert_exact(served.model, prompt, answer)
        hit += answer.sources[2]
    assert hit >= 40 * (len(PROMPTS) - 2)
    wait_idle(engine)


def test_a_flush_leaves_nothing_for_the_next_start(make_engine: MakeEngine) -> None:
    """Also not the records that were evicted before: they hold users' text as well."""
    engine = make_engine(sizes=Sizes(device=40, host=24, disk_bytes=192 << 10))
    for index in range(20):
        ask(engine, [(index * 11 + place * 5) % 97 for place in range(40)], max_tokens=2)
    wait_idle(engine)
    assert engine.stats()["disk_evicted_pages"] > 0
    engine.flush()
    wait_idle(engine)
    engine.shutdown(drain_s=1.0, demote_s=0.0)
    again = make_engine(sizes=Sizes(device=40, host=24, disk_bytes=192 << 10))
    assert again._runtime.recovered == (0, 0)


def test_a_flush_clears_records_that_no_page_matches_any_more(
    make_engine: MakeEngine, served: ServedModel, tmp_path: Path
) -> None:
    """Below a corrupt record lie whole ones that left the tree with it; they hold users' tokens all the same."""
    before = fill(make_engine)
    flip(segments(tmp_path / "kv", "kv")[0], payload_offsets(segments(tmp_path / "kv", "kv")[0])[0])
    engine, _ = ask_again(make_engine, served, before)
    assert engine.stats()["corrupt_records"] == 1
    assert engine.flush(30.0)["not_erased"] == 0
    engine.shutdown(drain_s=5.0, demote_s=0.0)
    assert make_engine()._runtime.recovered == (0, 0)


def test_demote_keeps_what_the_tier_below_has_no_room_for(make_engine: MakeEngine) -> None:
    engine = make_engine(sizes=Sizes(host=4, disk_bytes=0))
    before = [ask(engine, prompt) for prompt in PROMPTS]
    wait_idle(engine)
    report = engine.demote(["device"], 30.0)
    assert report["device_dropped"] <= 4
    assert report["device_kept"] == engine.stats()["device_resident_pages"] >= 50
    assert [ask(engine, prompt).tokens for prompt in PROMPTS] == [answer.tokens for answer in before]
    assert engine.stats()["prompt_tokens_device"] >= 200


def test_shutdown_brings_everything_through_a_small_host(
    make_engine: MakeEngine, served: ServedModel
) -> None:
    settings = {"sizes": Sizes(host=8), "write_policy": "selective", "selective_accesses": 50}
    engine = make_engine(**settings)
    before = [ask(engine, prompt) for prompt in PROMPTS]
    wait_idle(engine)
    stats = engine.stats()
    assert stats["disk_resident_pages"] == 0
    assert stats["device_resident_pages"] >= 8 * stats["host_capacity_pages"]
    kept = engine.shutdown(drain_s=5.0, demote_s=30.0)
    held = [kept[f"{tier}_resident_pages"] for tier in ("device", "host", "disk")]
    assert held == [0, 0, stats["device_resident_pages"]]
    again = make_engine(**settings)
    assert again._runtime.recovered[0] == stats["device_resident_pages"]
    after = [ask(again, prompt) for prompt in PROMPTS]
    assert [answer.tokens for answer in after] == [answer.tokens for answer in before]
    # What a hit saves is known before this process has computed any long prompt.
    first = after[0].last.usage if after[0].last else None
    assert first is not None and first.sources.disk > 0 and first.saved_s > 0
