"""Simulations from Python: equal ones are equal, other seeds are others, and what cannot be is said in words."""

from __future__ import annotations

import json
import signal
import threading
import time
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
from small import small

from strata import _core
from strata.config.options import CacheOptions, SchedulerOptions
from strata.errors import ConfigError, StrataError
from strata.simulate import (
    at_rate,
    configure,
    constants,
    names,
    simulate,
    simulate_many,
    simulate_traced,
    table,
)


def test_equal_configurations_give_equal_reports_and_other_seeds_other_ones() -> None:
    first = simulate(small(seed=1))
    assert first == simulate(small(seed=1)) == simulate_traced(small(seed=1)).report
    assert first["seed"] == 1 and first["finished"] == 40
    other = simulate(small(seed=2))
    assert other["finished"] == 40 and other["ttft"] != first["ttft"]
    text = json.dumps(small(seed=1))
    assert _core.simulate(text) == _core.simulate(text)


@pytest.mark.parametrize("system", names("systems"))
def test_every_system_in_the_table_runs(system: str) -> None:
    report = simulate(small(system))
    assert report["system"] == system and report["finished"] == 40
    assert report["ttft"]["p50"] <= report["ttft"]["p99"] <= report["ttft"]["max"]


@pytest.mark.parametrize("workload", names("workloads"))
@pytest.mark.parametrize("hardware", names("hardware"))
def test_every_workload_and_hardware_in_the_table_make_a_configuration(hardware: str, workload: str) -> None:
    config = configure(hardware, "llama-3.1-8b", "ours", workload)
    field = "agents_per_second" if workload == "tool-agent" else "rate"
    assert at_rate(config, 2.5)["workload"][field] == 2.5
    assert config == configure(hardware, "llama-3.1-8b", "ours", workload), "at_rate changes nothing in place"


def test_many_come_back_in_order_and_equal_those_run_alone() -> None:
    configs = [small(seed=seed) for seed in range(6)]
    reports = simulate_many(configs, workers=3)
    assert [report["seed"] for report in reports] == list(range(6))
    assert reports == [simulate(config) for config in configs]
    assert simulate_many([]) == []


def test_the_first_error_ends_the_others() -> None:
    endless = at_rate(small(), 1e-3)
    endless["workload"]["queries"] = 200_000
    with pytest.raises(ConfigError, match="no rows"):
        simulate_many([endless, {**small(), "no rows": 1}], workers=2)


def test_a_number_of_the_table_changes_what_is_drawn_from_it(tmp_path: Path) -> None:
    mine = table()
    mine["hardware"]["h200"]["prefill_efficiency"]["value"] /= 2
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(mine))
    whole = {"workload": {"queries": 5}}
    ours = configure("h200", "qwen2.5-14b", "ours", "loogle", whole)
    theirs = configure("h200", "qwen2.5-14b", "ours", "loogle", whole, table(file))
    assert theirs["hardware"].pop("prefill_efficiency") * 2 == ours["hardware"].pop("prefill_efficiency")
    assert theirs == ours


def test_every_number_has_a_unit_and_a_source() -> None:
    def numbers(value: Any, path: str) -> list[str]:
        if isinstance(value, dict):
            if "value" in value:
                return [] if "unit" in value and value.get("source") else [path]
            return [found for name, inner in value.items() for found in numbers(inner, f"{path}.{name}")]
        return [path] if isinstance(value, int | float) and not isinstance(value, bool) else []

    assert numbers(table(), "") == []


def test_settings_of_ours_are_the_repository_s_defaults() -> None:
    ours = configure("h200", "qwen2.5-14b", "ours", "loogle")["system"]
    names = [field.name for field in fields(CacheOptions) if field.name in ours]
    names += [field.name for field in fields(SchedulerOptions) if field.name in ours]
    # A GPU's batch, runners and order of prefill and decode are the paper's, for all systems alike.
    given = {"batch_tokens", "max_running", "max_decode_stall_ms", "scheduler_off", "max_wait_s"}
    defaults = {**asdict(CacheOptions()), **asdict(SchedulerOptions())}
    assert len(names) > 8
    for name in set(names) - given:
        assert ours[name] == defaults[name], name


@pytest.mark.parametrize(
    ("chosen", "overrides", "complaint"),
    [
        (("h100", "qwen2.5-14b", "ours", "loogle"), {}, 'hardware "h100" is not in the table.*h200'),
        (("h200", "gpt", "ours", "loogle"), {}, 'models "gpt" is not in the table.*qwen2.5-14b'),
        (("h200", "qwen2.5-14b", "vllm", "loogle"), {}, 'systems "vllm" is not in the table.*vllm-lmcache'),
        (("h200", "qwen2.5-14b", "ours", "bible"), {}, 'workloads "bible" is not in the table.*loogle'),
        (("h200", "qwen2.5-14b", "ours", "loogle"), {"sed": 1}, "unknown field `sed`.*seed"),
        (("h200", "qwen2.5-14b", "ours", "loogle"), {"seed": {1}}, "overrides cannot be written as JSON"),
    ],
)
def test_what_does_not_fit_is_named(
    chosen: tuple[str, str, str, str], overrides: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        configure(*chosen, overrides=overrides)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"system": {"policy": "best"}}, 'policy "best" is unknown: choose adaptive, static, lpm or fcfs'),
        ({"system": {"copy": "pigeon"}}, 'copies by "pigeon", hardware h200 knows'),
        ({"hardware": {"device_bytes": 1e9}}, "use more devices"),
        ({"system": {"max_wait_s": -1.0}}, "max_wait_s -1 is no time"),
    ],
)
def test_what_cannot_run_is_a_config_error(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        simulate(small(**changes))


def test_a_rate_that_is_none_is_refused() -> None:
    for rate in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match=r"--rate .* is no rate"):
            at_rate(small(), rate)
    with pytest.raises(ConfigError, match="'trace' brings its own arrivals"):
        at_rate({**small(), "workload": {"kind": "trace", "records": []}}, 1.0)


def test_a_table_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        table(tmp_path / "missing.json")
    file = tmp_path / "table.json"
    file.write_text("{")
    with pytest.raises(ConfigError, match="is no JSON"):
        table(file)
    file.write_text('{"hardware": {}}')
    with pytest.raises(ConfigError, match="lacks models, systems, workloads"):
        table(file)
    with pytest.raises(ConfigError, match="section 'towns' is unknown"):
        names("towns")
    assert "base" not in names("systems") and "base" in table()["systems"]
    assert constants.SHIPPED.is_file()


def test_a_watcher_ends_a_run_and_its_error_is_raised() -> None:
    def enough() -> None:
        raise StrataError("enough")

    long = small(workload={"queries": 200_000, "rate": 1.0})
    with pytest.raises(StrataError, match=r"^enough$"):
        _core.simulate(json.dumps(long), watch=enough)


def test_control_c_ends_a_run_since_other_threads_go_on_meanwhile() -> None:
    long = small(workload={"queries": 200_000, "rate": 1.0})
    # Whoever starts the tests in the background may have told them to ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupt = threading.Timer(0.3, signal.raise_signal, (signal.SIGINT,))
    try:
        interrupt.start()
        with pytest.raises(KeyboardInterrupt):
            simulate(long)
            time.sleep(60.0)
        interrupt.join()
    finally:
        signal.signal(signal.SIGINT, before)
