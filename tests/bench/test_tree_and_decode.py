"""The other two measurements: the fields and bounds they promise, on tiny inputs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pytest
from tiny_bench import tiny_served

from strata.bench import decode_command, tree
from strata.bench.decode_command import Round, engine_decode, random_prompts, result_of
from strata.config import StrataConfig
from strata.engine.engine import Engine
from strata.errors import ConfigError


def test_tree_json_has_a_row_for_each_page_size_and_length(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree, "GROWTH_TOKENS", (8_192, 40_960))
    monkeypatch.setattr(tree, "BLOCK_S", 0.0)
    assert tree.main(["--rounds", "3", "--json", "-"]) == 0
    shown = capsys.readouterr()
    result = json.loads(shown.out)
    rows = {(row["page_size"], row["tokens"]): row for row in result["rows"]}
    assert set(rows) == {(16, 4096), (16, 131072), (1, 4096), (1, 131072)}
    for row in rows.values():
        assert all(row[name] > 0 for name in ("match_us", "insert_us", "memcmp_us", "memcpy_us"))
    assert [row["tree_tokens"] for row in result["growth"]] == [[8_192, 40_960]] * 2
    assert [bound["name"] for bound in result["bounds"]] == [
        "match of 4,096",
        "insert of 4,096",
        "match of 131,072",
        "match in a tree of 1M",
    ]
    assert result["manifest"]["seed"] == 0
    assert "page faults" in result["notes"][0]
    assert "microseconds a call" in shown.err


def test_tree_refuses_no_rounds() -> None:
    with pytest.raises(ConfigError, match="--rounds 0 is too small"):
        tree.main(["--rounds", "0"])


def test_inserts_are_of_new_tokens_into_room_that_an_eviction_made() -> None:
    generator = np.random.default_rng(1)
    assert tree.insert_us(16, 256, 40, generator) > 0
    cache = tree.cache_with(tree.random_tokens(generator, 256), 16, spare_tokens=64)
    assert cache.pages() == (20, 4, 16, 0)
    tree.insert(cache, tree.random_tokens(generator, 256))
    cache.check()
    assert cache.pages()[2] == 20, "the first document made room, tail first"


def test_the_engine_decodes_all_streams_to_their_end(tmp_path: Path) -> None:
    config = StrataConfig.of(disk_path=tmp_path, disk_capacity="0", host_memory="0", device_memory="4MiB")
    prompts = random_prompts(97, streams=4, tokens=20, seed=0)
    served = tiny_served()
    with Engine(config, served) as engine:
        rate, tokens = engine_decode(engine, prompts, 5)
    assert rate > 0
    assert [len(stream) for stream in tokens] == [6] * 4
    _, expected = decode_command.load_reference(served.model, "tiny", from_folder=False).decode(prompts, 5)
    assert tokens == expected


def test_decode_reports_rates_bound_and_equality(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--streams",
        "3",
        "--prompt-tokens",
        "20",
        "--new-tokens",
        "4",
        "--pairs",
        "2",
        "--json",
        "-",
    ]
    sizes = ["--device-memory", "4MiB", "--host-memory", "0", "--disk-path", str(tmp_path / "kv")]
    assert decode_command.main([*arguments, *sizes], load=tiny_served) == 0
    shown = capsys.readouterr()
    result = json.loads(shown.out)
    assert result["equal_streams"] == 1.0
    assert result["engine_tokens_per_s"] > 0 and result["reference_tokens_per_s"] > 0
    assert len(result["rounds"]) == 2
    assert "tokens/s" in shown.err


def test_decode_holds_where_the_engine_is_as_fast() -> None:
    options = argparse.Namespace(streams=8, prompt_tokens=1, new_tokens=2)
    for ours, holds in ((100.0, True), (99.0, False)):
        result = result_of(options, [Round(ours, 100.0, 1.0)], {})
        assert result["bounds"][0]["holds"] is holds


def test_decode_refuses_what_gives_no_rate() -> None:
    with pytest.raises(ConfigError, match="--new-tokens 1 is too small"):
        decode_command.main(["--new-tokens", "1"])
