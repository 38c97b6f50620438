"""The whole command: against a fake server for what it reports and refuses, and against `strata.serve` for warm starts,
chats and traces."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from fake_openai_server import CHARACTERS_PER_TOKEN, FakeOpenAIServer
from tiny_bench import write_lines

from strata.bench import serve_command
from strata.bench.__main__ import COMMANDS
from strata.errors import ConfigError, StrataError

SMALL = ["--documents", "3", "--tokens", "40", "--max-tokens", "4", "--requests", "6", "--rates", "200"]
SIZES = ["--device-memory", "4MiB", "--host-memory", "8MiB", "--disk-capacity", "64MiB"]


def result_of(arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> dict[str, Any]:
    """The JSON object of a run, which must be all that is on stdout."""
    assert serve_command.main([*arguments, "--json", "-"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_any_server_is_measured_at_every_rate_with_every_seed(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeOpenAIServer(cached_tokens=8, max_model_len=500) as server:
        flags = [*SMALL, "--url", server.url + "/v1", "--rates", "100,200", "--seeds", "3,4"]
        result = result_of(flags, capsys)
        prompts = [body["prompt"] for body in server.streamed]
    assert [(run["rate"], run["seed"]) for run in result["runs"]] == [(100, 3), (100, 4), (200, 3), (200, 4)]
    assert [rate["rate"] for rate in result["rates"]] == [100, 200]
    assert len(prompts) == len(set(prompts)) == 4 * 6
    assert not result["failures"]
    for rate in result["rates"]:
        figures = rate["figures"]
        for name in ("ttft_s", "ttft_sent_s", "token_gap_s"):
            order = [figures[f"{name}_{kind}"]["median"] for kind in ("p50", "p90", "p99", "max")]
            assert order == sorted(order) and order[0] > 0
        assert figures["output_tokens"] == {"median": 24, "least": 24, "most": 24}
        assert figures["tokens_cached"]["median"] == 6 * 8
        assert figures["output_tokens_per_s"]["least"] <= figures["output_tokens_per_s"]["most"]
    for run in result["runs"]:
        assert len(run["requests"]) == 6
        assert all(request["error"] is None for request in run["requests"])
    facts = result["manifest"]
    assert facts["flags"]["seeds"] == "3,4" and facts["flags"]["max_in_flight"] == 128
    assert facts["server"] == {
        "model": "fake",
        "max_model_len": 500,
        "owned_by": "tests",
        "is_strata": False,
        "tier_capacity_bytes": None,
    }
    assert facts["characters_per_token"] == CHARACTERS_PER_TOKEN and facts["settings"] is None
    assert {"version", "program", "processor", "usable_cores"} <= facts.keys()
    assert "not flushed" in facts["state_before_each_run"]


def test_the_table_shows_what_the_json_holds(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeOpenAIServer() as server:
        assert serve_command.main([*SMALL, "--url", server.url]) == 0
    shown = capsys.readouterr().out
    for row in (
        "fake: documents",
        "TTFT from arrival, p99 (s)",
        "TTFT from sending, p50 (s)",
        "output tokens/s",
    ):
        assert row in shown
    assert "failures" not in shown


def test_a_failure_is_reported_and_is_the_exit_code(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with FakeOpenAIServer(faults=["", "status", "", "status"]) as server:
        flags = [*SMALL, "--url", server.url]
        result = result_of(flags, capsys, code=1)
        assert serve_command.main(flags) == 0, "no fault is left"
        server.faults.append("cut")
        assert serve_command.main(flags) == 1
    assert "ended without" in capsys.readouterr().out
    (failure,) = result["failures"]
    assert failure["count"] == 2 and "no room on the moon" in failure["message"]
    figures = result["runs"][0]["figures"]
    assert figures["requests"] == 6 and figures["failed"] == 2 and figures["output_tokens"] == 16


def test_a_run_that_cannot_be_made_takes_no_result_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    # Three documents and six questions are the first run; the warm start of the second fails.
    with FakeOpenAIServer(faults=[""] * 9 + ["status"]) as server:
        url = server.url.replace("://", "://user:secret@")
        flags = [*SMALL, "--url", url, "--warm", "device", "--seeds", "1,2,3"]
        result = result_of(flags, capsys, code=1)
        server.faults.append("status")
        with pytest.raises(StrataError, match="--warm device: the server did not answer"):
            serve_command.main(flags)
    assert [run["seed"] for run in result["runs"]] == [1] and result["manifest"]["seeds"] == [1, 2, 3]
    (failure,) = result["failures"]
    assert failure["message"].startswith("2 of 3 runs are missing: --warm device")
    assert "secret" not in json.dumps(result)


def test_the_same_seed_asks_the_same_again(capsys: pytest.CaptureFixture[str]) -> None:
    def prompts() -> list[str]:
        with FakeOpenAIServer() as server:
            flags = [*SMALL, "--url", server.url, "--min-distance", "1", "--max-distance", "3"]
            result = result_of(flags, capsys)
            distance = result["runs"][0]["cache_distance"]
            assert 1 <= distance["least"] <= distance["most"] <= 3
            return sorted(body["prompt"] for body in server.streamed)

    assert prompts() == prompts()


def test_a_warm_device_is_every_document_once_before_the_clock(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeOpenAIServer() as server:
        result = result_of([*SMALL, "--url", server.url, "--warm", "device"], capsys)
        warm, load = server.streamed[:3], server.streamed[3:]
    assert all(body["max_tokens"] == 1 for body in warm) and len(load) == 6
    texts = [body["prompt"] for body in warm]
    assert all(any(body["prompt"].startswith(text) for text in texts) for body in load)
    assert result["runs"][0]["figures"]["requests"] == 6, "the warm start is not measured"


def test_a_picture_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeOpenAIServer() as server:
        for suffix, beginning in ((".png", b"\x89PNG"), (".svg", b"<?xml")):
            picture = tmp_path / f"result{suffix}"
            flags = [*SMALL, "--rates", "100,200", "--url", server.url, "--plot", str(picture)]
            assert serve_command.main(flags) == 0
            assert picture.read_bytes().startswith(beginning)


def test_without_matplotlib_a_picture_is_refused_before_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr("strata.bench.load.plot.importlib.import_module", missing)
    with pytest.raises(ConfigError, match=r"install the extra `plot`: pip install 'strata-kv\[plot\]'"):
        serve_command.main(["--plot", "x.png"])


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--rates", "0"], "--rates 0 must be above 0"),
        (["--rates", "fast"], "--rates 'fast' are no numbers"),
        (["--seeds", "1,1"], "names a number twice"),
        (["--seeds", "1.5"], "--seeds '1.5' are no numbers"),
        (["--duration", "0"], "--duration 0 must be above 0"),
        (["--max-in-flight", "0"], "--max-in-flight 0 is too small"),
        (["--requests", "0"], "--requests 0 is too small"),
        (["--workload", "trace"], "needs --trace FILE"),
        (["--trace", "x.jsonl"], "needs --workload trace"),
        (["--workload", "trace", "--trace", "/no/such"], "--trace /no/such cannot be read"),
        (["--workload", "chat", "--endpoint", "completions"], "resends a history"),
        (["--docs", "/no/such"], "--docs /no/such cannot be read"),
        (["--json", "/no/such/x"], "its folder does not exist"),
        (["--plot", "x.gif"], "must end in one of"),
        (["--url", "localhost:8000"], "--url 'localhost:8000' is no server's address"),
        (["--url", "http://a:port"], "--url 'http://a:port' is no server's address"),
        (["--keep-documents"], "--keep-documents is for"),
        (["--cold-documents", "1"], "--cold-documents is for"),
        (["--cold-documents", "16", "--warm"], "--cold-documents 16 must be from 0"),
        (["--url", "http://127.0.0.1:9", "--page-size", "16"], "--page-size 16: with --url"),
    ],
)
def test_what_cannot_be_measured_is_refused_at_once(flags: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError) as raised:
        serve_command.main(flags)
    assert complaint in str(raised.value)


def test_the_names_of_stratas_one_model_are_no_choice() -> None:
    with FakeOpenAIServer(models=("own", "default"), owner="strata") as server:
        assert serve_command.main([*SMALL, "--url", server.url]) == 0
        assert {body["model"] for body in server.bodies} == {"own"}


def test_what_a_server_cannot_do_is_refused() -> None:
    with pytest.raises(StrataError, match="is a server running there"):
        serve_command.main(["--url", "http://127.0.0.1:9"])
    with FakeOpenAIServer(max_model_len=100, models=("one", "two")) as server:
        url = ["--url", server.url]
        with pytest.raises(ConfigError, match="give --model, one of one, two"):
            serve_command.main(url)
        url += ["--model", "two"]
        with pytest.raises(ConfigError, match="--warm host needs Strata's /cache routes"):
            serve_command.main([*url, "--warm"])
        with pytest.raises(ConfigError, match="the model's context has 100; lower one of them"):
            serve_command.main([*url, "--tokens", "90"])
        server.tells_usage = False
        with pytest.raises(StrataError, match="give --characters-per-token"):
            serve_command.main(url)
        assert serve_command.main([*url, *SMALL, "--tokens", "16", "--characters-per-token", "4"]) == 0


def test_strata_is_measured_from_a_host_that_holds_everything(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--model", str(folder), "--disk-path", str(tmp_path / "kv"), *SIZES, "--warm"]
    result = result_of([*flags, *SMALL, "--tokens", "300", "--seeds", "1,2"], capsys)
    for run in result["runs"]:
        held, figures = run["warm_tokens"], run["figures"]
        assert held["device"] == 0 and held["host"] >= 3 * 300
        assert figures["tokens_host"] >= 3 * 288, "the first question about each document"
        sources = sum(figures[f"tokens_{name}"] for name in ("device", "host", "disk", "computed"))
        assert sources == figures["prompt_tokens"]
        assert run["server_stats"]["prompt_tokens_host"] == figures["tokens_host"]
    facts = result["manifest"]
    assert facts["server"]["is_strata"] and facts["own_server"] and facts["settings"]["page_size"] == 16
    assert facts["state_before_each_run"] == "all tiers flushed, then warm: host"
    kept = [
        "--model",
        str(folder),
        "--disk-path",
        str(tmp_path / "kept"),
        *SIZES,
        "--warm",
        "--keep-documents",
    ]
    first, second = result_of([*kept, *SMALL, "--tokens", "300", "--seeds", "1,2"], capsys)["runs"]
    assert first["warm_tokens"]["device"] == second["warm_tokens"]["device"] == 0
    assert second["figures"]["tokens_host"] >= 3 * 288
    assert second["figures"]["tokens_computed"] > 6 * 16, "questions are computed in every run"


def test_strata_is_measured_from_disk_with_chats_and_with_a_trace(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--model", str(folder), *SIZES, "--tokens", "200", "--max-tokens", "4", "--rates", "50"]
    disk = [*flags, "--disk-path", str(tmp_path / "one"), "--requests", "4", "--documents", "4"]
    (run,) = result_of([*disk, "--warm", "disk", "--prefetch-policy", "wait"], capsys)["runs"]
    assert run["warm_tokens"]["host"] == 0 and run["figures"]["tokens_disk"] > 0

    chat = [*flags, "--disk-path", str(tmp_path / "two"), "--workload", "chat", "--think-s", "0.01"]
    (run,) = result_of([*chat, "--requests", "6", "--rounds", "3", "--documents", "2"], capsys)["runs"]
    assert sorted(request["turn"] for request in run["requests"]) == [0, 0, 1, 1, 2, 2]
    assert run["figures"]["tokens_device"] > 4 * 192, "a round finds the rounds before it"

    lines = [
        {
            "timestamp": 100 * number,
            "input_length": 6000,
            "output_length": 90,
            "hash_ids": [*range(11), number + 20],
        }
        for number in range(3)
    ]
    trace = write_lines(tmp_path / "trace.jsonl", lines)
    replay = ["--model", str(folder), *SIZES, "--disk-path", str(tmp_path / "three"), "--workload", "trace"]
    replay += ["--trace", str(trace), "--length-scale", "0.05", "--time-scale", "20"]
    (run,) = result_of(replay, capsys)["runs"]
    first, *later = sorted(run["requests"], key=lambda request: float(request["due_s"]))
    assert [request["output_tokens"] for request in run["requests"]] == [4, 4, 4]
    assert first["sources"]["computed"] == first["prompt_tokens"] and run["cut_prompts"] == 0
    assert all(request["sources"]["device"] >= 256 for request in later), "eleven blocks are shared"


def test_the_command_is_listed() -> None:
    module, _ = COMMANDS["serve"]
    assert importlib.import_module(module).main is serve_command.main
