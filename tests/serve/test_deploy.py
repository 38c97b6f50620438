"""What lies in `deploy/` fits the server: settings exist, limits of time suit each other, the dashboard is one. That
its metrics exist is checked against a real engine, in `tests/e2e/test_metrics_agree.py`.
"""

from __future__ import annotations

import configparser
import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from strata.config import ServerOptions, read_config
from strata.serve.lifecycle import GRACE_S

DEPLOY = Path(__file__).parents[2] / "deploy"


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((DEPLOY / "grafana.json").read_text(encoding="utf-8"))
    return loaded


def expressions(dashboard: dict[str, Any]) -> Iterator[str]:
    """Everything that the dashboard asks Prometheus."""
    for panel in dashboard["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]


def test_a_stop_while_the_model_loads_is_no_failure() -> None:
    assert unit()["Service"]["SuccessExitStatus"] == str(128 + signal.SIGTERM)


def test_the_dashboard_is_well_formed(dashboard: dict[str, Any]) -> None:
    panels = dashboard["panels"]
    assert {"title", "uid", "schemaVersion", "time", "templating", "panels"} <= dashboard.keys()
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells
        assert panel["type"] == "row" or (panel["targets"] and panel["title"] and panel["description"])
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    for expression in expressions(dashboard):
        assert expression.count("(") == expression.count(")"), expression
        for name in re.findall(r"\$\{?(\w+)", expression):
            assert name in variables or name.startswith("__"), expression


def unit() -> configparser.RawConfigParser:
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(DEPLOY / "strata.service", encoding="utf-8")
    return parser


def test_the_unit_waits_for_as_long_as_a_stop_may_take() -> None:
    options = ServerOptions()
    whole_s = options.leave_notice_s + options.drain_timeout_s + options.demote_timeout_s + GRACE_S
    service = unit()["Service"]
    assert int(service["TimeoutStopSec"]) > whole_s
    assert service["Type"] == "notify" and service["StateDirectory"] == "strata"


@pytest.mark.parametrize("file", ["strata.service", "Containerfile"])
def test_every_variable_is_a_setting(file: str) -> None:
    lines = (DEPLOY / file).read_text(encoding="utf-8").splitlines()
    text = "\n".join(line for line in lines if not line.startswith("#"))
    given = dict(re.findall(r"(STRATA_\w+)=(\S+)", text))
    assert "STRATA_DISK_PATH" in given
    config = read_config((), {**given, "STRATA_DISK_CAPACITY": "0"})
    assert str(config.cache.disk_path).endswith("/strata/kv")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_takes_the_unit_and_the_template_of_the_guide(tmp_path: Path) -> None:
    text = (DEPLOY / "strata.service").read_text(encoding="utf-8")
    text = text.replace("/opt/strata/bin/strata", sys.executable)
    guide = (DEPLOY.parent / "docs" / "OPERATIONS.md").read_text(encoding="utf-8")
    (pattern, replacement) = re.findall(r"sed 's/(.+?)/(.+?)/' deploy/strata.service", guide)[0]
    template = re.sub(pattern, replacement.replace("&", r"\g<0>"), text, flags=re.MULTILINE)
    assert f"ExecStart={sys.executable} serve --port %i\n" in template
    for name, content in ("strata.service", text), ("strata@8001.service", template):
        copy = tmp_path / name
        copy.write_text(content, encoding="utf-8")
        checked = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", str(copy)], capture_output=True, text=True, timeout=60
        )
        assert checked.returncode == 0 and name not in checked.stderr, checked.stderr
