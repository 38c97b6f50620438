"""`--print-config`: every setting with its origin, and nothing secret; variables that are no settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from strata.config import StrataConfig, read_config
from strata.config.knobs import knobs_of
from strata.config.sources import PARTS
from strata.errors import ConfigError

SECRET = "s3cret-key"


def printed(capsys: pytest.CaptureFixture[str], *flags: str, **environment: str) -> str:
    """What the program prints instead of starting; it must exit with 0."""
    with pytest.raises(SystemExit) as ended:
        read_config(flags, environment)
    assert not ended.value.code
    return capsys.readouterr().out


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "strata.toml"
    path.write_text('host-memory = "2GiB"\nport = 9001\n', encoding="utf-8")
    return path


def test_each_value_names_its_origin(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    flags = ("--config", str(file), "--page-size", "4", "--print-config", "json")
    body: dict[str, Any] = json.loads(printed(capsys, *flags, STRATA_PORT="9002", STRATA_DISK_CAPACITY="0"))
    assert list(body) == list(PARTS)
    assert {name for part in body.values() for name in part} == {
        name.replace("_", "-") for part in PARTS.values() for name in knobs_of(part)
    }

    def origin(part: str, name: str) -> tuple[Any, str]:
        return body[part][name]["value"], body[part][name]["origin"]

    assert origin("cache", "page-size") == (4, "flag --page-size")
    assert origin("server", "port") == (9002, "environment STRATA_PORT")
    assert origin("cache", "host-memory") == (2 << 30, f"file {file}")
    assert origin("scheduler", "batch-tokens") == (512, "default")
    assert origin("cache", "device-memory")[1] == "default, worked out from this machine"
    assert body["server"]["port"]["flag"] == "--port"
    assert body["server"]["port"]["variable"] == "STRATA_PORT"


def test_what_is_printed_can_be_read_back(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    flags = ("--page-size", "4", "--disk-path", str(tmp_path / 'a "quoted" path'), "--insecure")
    text = printed(
        capsys, *flags, "--print-config", STRATA_DEVICE_MEMORY="1GiB", STRATA_DISK_CAPACITY="500MB"
    )
    again = tmp_path / "again.toml"
    again.write_text(text, encoding="utf-8")
    once = read_config(flags, {"STRATA_DEVICE_MEMORY": "1GiB", "STRATA_DISK_CAPACITY": "500MB"})
    back = read_config(("--config", str(again)), {})
    assert [getattr(back, part) for part in PARTS] == [getattr(once, part) for part in PARTS]
    assert 'device-memory = "1GiB"' in text


@pytest.mark.parametrize("form", ["toml", "json"])
def test_secrets_are_never_printed(capsys: pytest.CaptureFixture[str], tmp_path: Path, form: str) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(f'api-key = "{SECRET}"\n', encoding="utf-8")
    ways: list[tuple[tuple[str, ...], dict[str, str]]] = [
        (("--api-key", SECRET), {}),
        ((), {"STRATA_API_KEY": SECRET}),
        (("--config", str(file)), {}),
    ]
    for flags, environment in ways:
        text = printed(capsys, *flags, "--print-config", form, STRATA_DISK_CAPACITY="0", **environment)
        assert SECRET not in text and "(set, not shown)" in text
    assert "(set, not shown)" not in printed(capsys, "--print-config", form, STRATA_DISK_CAPACITY="0")


def test_a_wrong_setting_is_still_refused() -> None:
    with pytest.raises(ConfigError, match="--page-size 0"):
        read_config(("--print-config", "--page-size", "0"), {})


@pytest.mark.parametrize(
    ("variable", "words"),
    [
        (
            "STRATA_PAGE_SISE",
            "environment STRATA_PAGE_SISE is no setting of Strata; did you mean STRATA_PAGE_SIZE?",
        ),
        (
            "STRATA_QQQQQQQQQQ",
            "environment STRATA_QQQQQQQQQQ is no setting of Strata; `strata serve --help` lists",
        ),
        ("STRATA_page_size", "environment STRATA_page_size is no setting"),
    ],
)
def test_a_variable_that_is_no_setting(variable: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config((), {variable: "1"})
    assert str(caught.value).startswith(words)


def test_variables_of_others_are_left_alone() -> None:
    of_kubernetes = {
        "STRATA_SERVICE_HOST": "10.0.0.1",
        "STRATA_SERVICE_PORT_HTTP": "8000",
        "STRATA_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "STRATA_PORT_8000_TCP_ADDR": "10.0.0.1",
        "STRATA_CHAT_PORT": "tcp://10.0.0.2:8000",
        "STRATA_CHAT_SERVICE_HOST": "10.0.0.2",
    }
    ours = {"STRATA_CACHE_DIR": "/models", "STRATA_SOAK": "1", "STRATA_SOAK_SEED": "7", "OTHER": "x"}
    config = read_config((), {**of_kubernetes, **ours, "STRATA_DISK_CAPACITY": "0"})
    assert set(config.origins) == {"disk_capacity"} and config.server.port == StrataConfig().server.port
    with pytest.raises(ConfigError, match="Kubernetes sets for a service named strata"):
        read_config((), {"STRATA_PORT": "tcp://10.0.0.1:8000"})
