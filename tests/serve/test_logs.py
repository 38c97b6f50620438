"""The log as JSON: every line an object, the request's numbers in fields; and what no log may ever hold."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from typing import Any

import httpx
import pytest
from running_server import wait_until
from server_process import PACKAGE, Run, ServerProcess

from strata.engine.api import TokenSources, Usage
from strata.serve import request_id
from strata.serve.logs import JsonFormatter
from strata.serve.request_log import log_cut, log_finished

PROMPT, KEY, WRONG_KEY = "s3cret-prompt", "s3cret-key", "s3cret-wrong-key"
OF_THE_FAKE = ("OMP_WAIT_POLICY=", "torch is imported", "submitted", "shutdown called")


def objects(output: str) -> list[dict[str, Any]]:
    """The lines of a log; those that the fake engine prints by itself are left out."""
    return [json.loads(line) for line in output.splitlines() if not line.startswith(OF_THE_FAKE)]


def test_every_line_of_a_server_is_an_object(run: Run) -> None:
    program = run("--log-format", "json")
    wait_until(lambda: '"serving http' in program.output, 30)
    url = next(line["message"] for line in objects(program.output) if line["message"].startswith("serving"))
    url = url.removeprefix("serving ")
    header = {"X-Request-Id": "req-9"}
    answer = httpx.post(url + "/v1/completions", json={"prompt": "x" * 4000}, headers=header)
    assert answer.status_code == 200
    program.process.send_signal(signal.SIGTERM)
    assert program.exit_code() == 0
    lines = objects(program.output)
    assert all(list(line)[:4] == ["time", "level", "logger", "message"] for line in lines)
    assert all(line["time"].endswith("Z") and line["level"] == "info" for line in lines)
    messages = [line["message"] for line in lines]
    assert messages[0].startswith("[1/3] Address") and messages[-1].startswith("Stopped after")
    assert (lines[-1]["device_moved"], lines[-1]["disk_resident_pages"]) == (250, 250)
    (request,) = [line for line in lines if "prompt_tokens" in line]
    assert request["message"].startswith("4,000 in: 4,000 computed | TTFT")
    assert request["logger"] == "strata.serve" and request["request_id"] == "req-9"
    assert (request["prompt_tokens"], request["computed_tokens"], request["disk_tokens"]) == (4000, 4000, 0)
    assert request["ttft_s"] == 0.25


def test_libraries_warnings_and_errors_have_the_same_form() -> None:
    code = """
import logging, threading, warnings
from strata.config import ServerOptions
from strata.serve.logs import set_up_logging
set_up_logging(ServerOptions(log_format="json"))
logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
logging.getLogger("asyncio").info("of no interest")
warnings.warn("this is old")
thread = threading.Thread(target=lambda: 1 / 0)
thread.start(); thread.join()
logging.getLogger("strata.serve").info("one\\nline, \\u2028 and \\"quotes\\"")
raise RuntimeError("the end")
"""
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(PACKAGE)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 1 and ended.stderr == ""
    lines = [json.loads(line) for line in ended.stdout.splitlines()]
    assert [(line["logger"], line["level"]) for line in lines] == [
        ("uvicorn.error", "warning"),
        ("py.warnings", "warning"),
        ("strata", "error"),
        ("strata.serve", "info"),
        ("strata", "error"),
    ]
    assert "this is old" in lines[1]["message"]
    assert "ZeroDivisionError" in lines[2]["exception"] and "RuntimeError: the end" in lines[4]["exception"]
    assert lines[3]["message"] == 'one\nline, \u2028 and "quotes"'


def test_the_lines_of_a_request_name_it_and_its_numbers(caplog: pytest.LogCaptureFixture) -> None:
    usage = Usage(100, 12, TokenSources(1, 2, 3, 94), 1.25, 0.5, 2, queue_s=0.25, prefill_s=1.0, decode_s=3.0)
    token = request_id._current.set("req-7")
    with caplog.at_level(logging.INFO, "strata.serve"):
        log_finished(usage)
        log_cut(5)
        finished, cut = [json.loads(JsonFormatter().format(record)) for record in caplog.records]
    request_id._current.reset(token)
    assert finished["request_id"] == cut["request_id"] == "req-7"
    numbers = {name: value for name, value in finished.items() if isinstance(value, int | float)}
    assert numbers == {
        "prompt_tokens": 100,
        "device_tokens": 1,
        "host_tokens": 2,
        "disk_tokens": 3,
        "computed_tokens": 94,
        "completion_tokens": 12,
        "preemptions": 2,
        "ttft_s": 1.25,
        "saved_s": 0.5,
        "queue_s": 0.25,
        "prefill_s": 1.0,
        "decode_s": 3.0,
    }
    assert cut["pieces"] == 5
    assert "request_id" not in json.loads(JsonFormatter().format(caplog.records[0]))


@pytest.mark.parametrize("form", ["text", "json"])
def test_no_prompt_and_no_key_is_ever_logged(run: Run, form: str) -> None:
    flags = ("--log-format", form, "--log-level", "debug", "--api-key", KEY, "--drain-timeout-s", "1")
    program = run(*flags, FAKE_PIECES="2", FAKE_HOLD="1")
    wait_until(lambda: "serving" in program.output, 30)
    url = program.output.split("Address ")[1].split(" is free")[0]
    ask_in_all_ways(url, program)
    program.process.send_signal(signal.SIGTERM)
    assert program.exit_code() == 0
    assert "submitted" in program.output and "cut after" in program.output
    assert "s3cret" not in program.output


def ask_in_all_ways(url: str, program: ServerProcess) -> None:
    """Sends the prompt and the keys wherever a client can put them, right and wrong."""
    with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {KEY}"}, timeout=30) as client:
        path = "/v1/completions"
        with client.stream("POST", path, json={"prompt": PROMPT, "stream": True}) as answer:
            assert answer.status_code == 200
            wait_until(lambda: "submitted" in program.output)
        wrong: list[Any] = [
            {"prompt": [PROMPT, {}]},
            {"prompt": PROMPT, "max_tokens": PROMPT},
            {"prompt": PROMPT, "model": PROMPT},
            {"prompt": PROMPT * 1000},
            {"prompt": PROMPT, "stop": {"a": PROMPT}},
            [PROMPT],
        ]
        for body in wrong:
            assert 400 <= client.post(path, json=body).status_code < 500, body
        bad = f'{{"prompt": "{PROMPT}'
        assert client.post(path, content=bad, headers={"Content-Type": "application/json"}).status_code == 400
        chat = {"messages": [{"role": PROMPT, "content": PROMPT}], "max_tokens": 9999}
        assert client.post("/v1/chat/completions", json=chat).status_code == 400
        key = {"Authorization": f"Bearer {WRONG_KEY}"}
        assert client.post(path, json={"prompt": PROMPT}, headers=key).status_code == 401
