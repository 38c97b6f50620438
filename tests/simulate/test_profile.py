"""A machine's profile: known constants come out of logs with noise and outliers, what the doctor found comes with them,
and a simulation of the fitted machine is one of the known machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from profile_logs import (
    COSTS,
    GAP_S,
    LINK,
    MODEL,
    SERVED,
    header,
    machine,
    shapes,
    steps,
    transfers,
    write,
    write_log,
)

from strata.engine import step_log as written
from strata.errors import ConfigError
from strata.simulate import configure, simulate, table
from strata.simulate.doctor import hardware_of
from strata.simulate.fit import Residuals, fit_times
from strata.simulate.profile import Profile, fit_profile, main, step_terms, table_with
from strata.simulate.served import server_overrides
from strata.simulate.step_log import TRANSFERS, VERSION, read_step_log

DOCTOR: dict[str, Any] = {
    "facts": {
        "available_memory": 8 << 30,
        "copy_rate": 6e9,
        "disk": {"read_rate": 4e8, "write_rate": 3e8, "free_bytes": 50 << 30},
    }
}
# Seconds for each FLOP, byte, ...: what the fit finds directly.
EXACT = np.array([1 / COSTS[name] if name != "row_overhead_s" else COSTS[name] for name in COSTS])


def constants(profile: Profile) -> dict[str, float]:
    """The fitted numbers without unit and source."""
    return {name: profile.hardware[name]["value"] for name in COSTS}


def explicit(**changes: Any) -> dict[str, Any]:
    """Questions about shared documents, and a conversation."""
    requests: list[dict[str, Any]] = [
        {
            "arrival_s": 0.4 * number,
            "prompt": [{"id": number % 3, "tokens": 900}, {"id": 100 + number, "tokens": 40}],
            "output": 6,
            "answer": 200 + number,
        }
        for number in range(12)
    ]
    last = requests[-1]
    requests.append(
        {
            "arrival_s": 0.0,
            "after": {"request": 11, "think_s": 1.0},
            "prompt": [*last["prompt"], {"id": last["answer"], "tokens": 6}, {"id": 300, "tokens": 30}],
            "output": 4,
            "answer": 301,
        }
    )
    return {"kind": "explicit", "requests": requests, **changes}


def test_an_exact_log_gives_exact_constants(tmp_path: Path) -> None:
    profile = fit_profile(read_step_log(write_log(tmp_path / "log")), MODEL)
    assert constants(profile) == pytest.approx(COSTS, rel=1e-6)
    assert profile.hardware["step_overhead_s"]["value"] == pytest.approx(GAP_S, rel=1e-6)
    assert profile.hardware["overlaps_reads"] is False
    link = profile.hardware["copies"]["threads"]
    assert link["per_operation_s"]["value"] * 30 == pytest.approx(LINK[0], rel=1e-6)
    assert link["to_device"]["value"] == pytest.approx(LINK[1], rel=1e-6)
    assert link["to_host"]["value"] == pytest.approx(LINK[1], rel=1e-6)
    assert profile.model == SERVED
    for of in profile.residuals.values():
        assert of.count > 100 and of.p90 < 1e-6 and of.total_ratio == pytest.approx(1)


@pytest.mark.parametrize("seed", range(5))
def test_constants_come_out_of_noise_and_outliers(tmp_path: Path, seed: int) -> None:
    noise, outliers, count = 0.03, 0.05, 400
    lines = steps(shapes(count, seed), noise, outliers, seed)
    log = read_step_log(write(tmp_path / "log", header(), *lines, *transfers()))
    found = fit_profile(log, MODEL)
    terms = step_terms(SERVED, log)
    exact = terms @ EXACT
    relative = terms / exact[:, None]
    # The standard errors of least squares; Huber's loss needs 5% more, and 5% of one-sided outliers pull by a tenth of
    # the noise.
    errors = noise * np.sqrt(np.diag(np.linalg.inv(relative.T @ relative)))
    costs = np.array(
        [1 / value if name != "row_overhead_s" else value for name, value in constants(found).items()]
    )
    assert (np.abs(costs - EXACT) <= 4 * 1.1 * errors + 0.1 * noise * EXACT).all()
    # Steps as a whole are known better than what they consist of: five terms share 400 measurements.
    assert np.abs(terms @ costs / exact - 1).mean() < 0.1 * noise + 2 * noise * np.sqrt(5 / count)
    residuals = found.residuals["decode"]
    assert residuals.median == pytest.approx(0.674 * noise, rel=0.35), (
        "the median of a normal law's deviations"
    )


def test_a_cost_below_nothing_is_nothing() -> None:
    features = np.array([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    falling = np.array([2.0, 1.9, 1.8, 1.7])
    costs = fit_times(features, falling)
    assert costs[1] == 0 and 1.7 <= costs[0] <= 2.0
    assert fit_times(np.stack([features[:, 0], np.zeros(4)], axis=1), np.full(4, 3.0)) == pytest.approx(
        [3.0, 0.0]
    )


def test_residuals_are_relative() -> None:
    of = Residuals.of(np.array([1.1, 2.0, 3.0]), np.array([1.0, 2.0, 4.0]))
    assert (of.count, of.median) == (3, pytest.approx(0.1)) and of.total_ratio == pytest.approx(6.1 / 7)


def test_the_fitted_machine_simulates_as_the_known_one(tmp_path: Path) -> None:
    log = read_step_log(write_log(tmp_path / "log"))
    fitted = fit_profile(log, MODEL)
    overrides = server_overrides(log)
    known = {**table_with(fitted, log), "hardware": {"known": machine()}}
    reports = []
    for name, entries in ((str(fitted.hardware["name"]), table_with(fitted, log)), ("known", known)):
        config = configure(name, "served", "served", "loogle", overrides, entries)
        config["workload"] = explicit()
        reports.append(simulate(config))
    one, other = reports
    assert (one["finished"], one["pages"], one["steps"]) == (13, [500, 900, 0], other["steps"])
    assert one["prompt_tokens"] == other["prompt_tokens"] and one["prompt_tokens"]["device"] > 5000
    assert one["ttft"]["mean"] == pytest.approx(other["ttft"]["mean"], rel=1e-5)
    assert one["output_tokens_per_s"] == pytest.approx(other["output_tokens_per_s"], rel=1e-5)
    assert one["link_busy_s"] == pytest.approx(other["link_busy_s"], rel=1e-4)


def test_core_decides_as_the_server_was_set(tmp_path: Path) -> None:
    overrides = server_overrides(read_step_log(write_log(tmp_path / "log")))
    system = overrides["system"]
    assert system["scheduler_off"] == ["bubbles", "early-loads"] and system["always_loads"] is False
    assert (system["page_size"], system["batch_tokens"], system["write_policy"]) == (16, 512, "through")
    assert (system["hierarchy"], system["disk"], overrides["pages"]) == (True, False, [500, 900, 0])


def test_the_doctor_knows_memory_copies_and_disk(tmp_path: Path) -> None:
    found = hardware_of(DOCTOR)
    assert found["device_bytes"]["value"] == found["host_bytes"]["value"] == 8 << 30
    assert found["copies"]["threads"]["to_device"]["value"] == 6e9
    assert {name: found["disk"][name]["value"] for name in ("bytes", "read", "write")} == {
        "bytes": 50 << 30,
        "read": 4e8,
        "write": 3e8,
    }
    unmeasured = {"facts": {**DOCTOR["facts"], "disk": {**DOCTOR["facts"]["disk"], "read_rate": None}}}
    assert "disk" not in hardware_of(unmeasured)
    with pytest.raises(ConfigError, match="--doctor lacks 'facts'"):
        hardware_of({})
    # Without a transfer in the log the doctor's rate is the link's; with one the log's own counts.
    silent = read_step_log(write(tmp_path / "silent", header(), *steps(shapes(60))))
    assert fit_profile(silent, MODEL, DOCTOR).hardware["copies"]["threads"]["to_host"]["value"] == 6e9
    spoken = fit_profile(read_step_log(write_log(tmp_path / "log")), MODEL, DOCTOR).hardware
    assert spoken["copies"]["threads"]["to_host"]["value"] == pytest.approx(LINK[1])
    assert spoken["disk"]["read"]["value"] == 4e8
    with pytest.raises(ConfigError, match=r"no transfer and --doctor is missing"):
        fit_profile(silent, MODEL)


def test_the_command_writes_a_table_that_the_simulator_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, output = write_log(tmp_path / "log"), tmp_path / "machine.json"
    (tmp_path / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    (tmp_path / "doctor.json").write_text(json.dumps(DOCTOR), encoding="utf-8")
    flags = ["--log", str(log), "--model", str(tmp_path), "--output", str(output), "--name", "desk"]
    assert main([*flags, "--doctor", str(tmp_path / "doctor.json")]) == 0
    assert "prefill: 1" in capsys.readouterr().out
    entries = table(output)
    config = configure("desk", "served", "served", "sharegpt", entries["profile"]["server"], entries)
    assert config["hardware"]["peak_flops"] == pytest.approx(COSTS["peak_flops"], rel=1e-6)
    assert "h200" in entries["hardware"] and entries["profile"]["residuals"]["decode"]["count"] > 100


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "is empty"),
        ([{"log": "something else"}], "is no step log"),
        ([header(version=99)], f"is of version 99, and this Strata reads version {VERSION}"),
        ([header()], "has no step"),
        ([header(), *steps(shapes(5))], "has 5 steps, and a fit needs 20"),
        ([header(), {"kind": "decode", "rows": 1}], "has a step without 'tokens'"),
        ([header(page_bytes=1000), *steps(shapes(30))], "keeps 384 numbers a token and layer"),
        (
            [header(model={"name": "other", "layers": 2, "hidden_size": 576}), *steps(shapes(30))],
            "num_hidden_layers 30, and the log is of other with 2",
        ),
        (
            [header(pages={"device": 500, "host": 900, "disk": 50}), *steps(shapes(30)), *transfers()],
            "give --doctor",
        ),
        ([header(), *steps([(True, [(1, 100, True)])] * 30), *transfers()], "no steps that differ in tokens"),
    ],
)
def test_what_cannot_be_fitted_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lines: list[dict[str, Any]], said: str
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(MODEL), encoding="utf-8")
    log, output = write(tmp_path / "log", *lines), tmp_path / "out"
    assert main(["--log", str(log), "--model", str(config), "--output", str(output)]) == 1
    assert said in capsys.readouterr().err and not output.exists()


def test_half_a_line_and_missing_files_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = write_log(tmp_path / "log", 30)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(MODEL), encoding="utf-8")
    flags = ["--model", str(config), "--output", str(tmp_path / "none" / "out")]
    assert main(["--log", str(log), *flags]) == 1
    assert "--output" in capsys.readouterr().err
    assert main(["--log", str(tmp_path / "nowhere"), *flags]) == 1
    assert "cannot be read" in capsys.readouterr().err
    log.write_text(log.read_text(encoding="utf-8")[:-9], encoding="utf-8")
    assert main(["--log", str(log), *flags]) == 1
    assert "remove it" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="the first line lacks 'scheduler'"):
        server_overrides(read_step_log(write(log, header(settings={"cache": {}}), *steps(shapes(3)))))
    with pytest.raises(ConfigError, match="only dense models"):
        fit_profile(read_step_log(write_log(log, 30)), {**MODEL, "num_local_experts": 8})


def test_reader_and_writer_are_of_one_version() -> None:
    assert (written.VERSION, written.TRANSFERS) == (VERSION, TRANSFERS)


def test_a_cost_that_the_log_hides_is_none(tmp_path: Path) -> None:
    """Steps whose time is all arithmetic: reads cost nothing, which is no error and no division by 0."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(MODEL), encoding="utf-8")
    lines = steps(shapes(300), memory_bandwidth=1e18)
    log, output = write(tmp_path / "log", header(), *lines, *transfers()), tmp_path / "out.json"
    assert main(["--log", str(log), "--model", str(config), "--output", str(output)]) == 0
    found = json.loads(output.read_text(encoding="utf-8"))["hardware"]["cpu"]
    assert found["memory_bandwidth"]["value"] > 1e15
    assert found["peak_flops"]["value"] == pytest.approx(COSTS["peak_flops"], rel=1e-3)
