"""The whole of `bench predict` with a tiny model: what is simulated is what was run. How close it comes is for a
measurement to say, not for a test."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from strata.bench import predict_command
from strata.errors import ConfigError

FIT = "--documents 3 --tokens 100 --max-tokens 4 --requests 8 --rates 20 --seeds 1"
CHAT = "--workload chat --documents 2 --tokens 60 --rounds 3 --think-s 0.05 --max-tokens 5 --requests 6 --rates 10"


def test_predictions_are_of_the_requests_that_were_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [
        "--model",
        str(folder),
        "--device-memory",
        "4MiB",
        "--host-memory",
        "8MiB",
        "--disk-capacity",
        "0",
    ]
    code = predict_command.main(["--fit", FIT, "--predict", CHAT, "--runs", "2", "--json", "-", *flags])
    result = json.loads(capsys.readouterr().out)
    assert code == 0 and result["failures"] == []
    fit, (chat,) = result["fit"], result["predictions"]
    assert fit["steps"] >= 8 and {"prefill", "decode"} == fit["residuals"].keys()
    assert fit["hardware"]["peak_flops"]["value"] > 0
    for found, requests, output in ((fit, 8, 4), (chat, 6, 5)):
        simulated = found["simulation"]
        assert found["requests"] == simulated["finished"] == requests
        for run in found["runs"]:
            assert run["requests"] == requests and run["output_tokens"] == requests * output
            # The answers' bytes may be fewer as text, so rounds of chats are only close.
            assert sum(simulated["prompt_tokens"].values()) == pytest.approx(run["prompt_tokens"], rel=0.05)
        for figure in found["figures"].values():
            assert figure["ratio"] == pytest.approx(figure["predicted"] / figure["mean"])
            assert figure["holds"] == (abs(figure["predicted"] - figure["mean"]) <= figure["allowed"])
    assert len(chat["runs"]) == 2
    # Documents are found again where the server found them.
    cached = sum(fit["simulation"]["prompt_tokens"][tier] for tier in ("device", "host"))
    assert cached > 0.3 * fit["runs"][0]["prompt_tokens"]
    assert result["manifest"]["fit"] == FIT and result["manifest"]["predict"] == [CHAT]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--fit", "--documents 2 --rates 1,2"], "give one rate and one seed"),
        (["--predict", "--warm host --rates 1"], "cannot be predicted"),
        (["--predict", "--rates 1 --device-memory 4MiB"], "is no flag of `bench serve`"),
        (["--disk-capacity", "64MiB"], "a disk tier cannot be fitted to it: give --disk-capacity 0"),
        (["--runs", "0"], "--runs 0 is too small"),
    ],
)
def test_what_cannot_be_predicted_is_said_before_a_server_starts(flags: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        predict_command.main(flags)
