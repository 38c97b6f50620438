"""The program from start to exit code, in a process of its own, around a fake engine."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from running_server import wait_until
from server_process import HERE, PACKAGE, Run

from strata.cli.main import main as strata_command
from strata.config import ServerOptions
from strata.serve import lifecycle
from strata.serve.binding import bind, listen, url_of


def test_banner_requests_and_exit(run: Run, tmp_path: Path) -> None:
    program = run()
    answer = httpx.post(program.url + "/v1/completions", json={"prompt": "x" * 4000})
    assert answer.status_code == 200
    program.process.send_signal(signal.SIGTERM)
    assert program.exit_code() == 0
    output = program.output
    assert "OMP_WAIT_POLICY=PASSIVE" in output
    assert "torch is imported under None" not in output
    assert [line[:5] for line in output.splitlines() if line.startswith("[")] == ["[1/3]", "[2/3]", "[3/3]"]
    assert re.search(r"model +fake-model, context 4,096 tokens", output)
    assert re.search(r"device +1 GiB of 4 GiB used, 1,000 tokens \| memory", output)
    assert re.search(r"host +off: --host-memory is 0", output)
    assert re.search(r"disk +512 MiB of 10 GiB used, 12,000 tokens \| 2 threads", output)
    assert (
        f"kept on disk in {tmp_path / 'strata' / 'kv'}" in output and "--disk-capacity 0 stops that" in output
    )
    assert f"curl {program.url}/v1/completions" in output
    assert re.search(r"\d 4,000 in: 4,000 computed \| TTFT 0\.2 s \| 3 out", output)
    assert "shutdown called, 0 unfinished, demote within 30 s" in output
    assert re.search(r"Stopped after \d+\.\d s: 250 pages are on disk, the next start is warm\n", output)
    assert "\x1b" not in output


def test_a_server_on_every_address_says_so_and_who_may_ask(run: Run) -> None:
    program = run("--host", "0.0.0.0", "--insecure")
    assert httpx.get(program.url + "/health").status_code == 200
    program.process.send_signal(signal.SIGTERM)
    assert program.exit_code() == 0
    words = " ".join(program.output.split())
    assert f"serving {program.url} (and every other address of this machine)" in words
    assert "everybody who reaches --host 0.0.0.0 can ask and flush the cache" in words


@pytest.mark.parametrize(
    ("disk", "device", "host", "said"),
    [
        (191, 0, 0, "191 pages are on disk, the next start is warm"),
        (
            1,
            2,
            3,
            "1 page is on disk, the next start is warm; up to 5 pages are lost, not written to disk within",
        ),
        (0, 1, 0, "up to 1 page is lost, not written to disk within --demote-timeout-s 30 or without room"),
        (0, 0, 0, ""),
    ],
)
def test_a_stop_names_as_lost_only_what_no_tier_keeps(disk: int, device: int, host: int, said: str) -> None:
    done = {"device_dropped": 191, "host_dropped": 191, "disk_resident_pages": disk}
    done |= {"device_resident_pages": device, "host_resident_pages": host}
    assert lifecycle.what_is_kept(done, 30.0).startswith(said)
    assert bool(said) == bool(lifecycle.what_is_kept(done, 30.0))
    assert lifecycle.what_is_kept({}, 30.0) == ""


def test_a_stop_with_a_disk_that_fails_says_so_and_promises_nothing() -> None:
    problem = "the disk tier is out of service: /kv/scratch.kv: Read-only file system"
    done = {"device_resident_pages": 2, "host_resident_pages": 3, "disk_resident_pages": 7}
    said = lifecycle.what_is_kept(done, 30.0, [problem])
    assert said == f"7 pages are on disk; up to 5 pages are lost; {problem}"
    assert (
        lifecycle.what_is_kept({"disk_resident_pages": 7}, 30.0, [problem])
        == f"7 pages are on disk; {problem}"
    )
    assert lifecycle.what_is_kept({}, 30.0, [problem]) == problem


def test_a_stop_whose_disk_cannot_be_closed_says_what_is_kept_all_the_same(run: Run) -> None:
    program = run(FAKE_DISK_HANGS="1")
    assert httpx.get(program.url + "/ready").status_code == 200
    program.process.send_signal(signal.SIGTERM)
    assert program.exit_code() == 1
    assert "250 pages are on disk; sync of disk root /kv did not finish within 10s" in program.output
    assert "Traceback" not in program.output


def test_running_requests_finish_before_the_exit(run: Run) -> None:
    program = run(FAKE_PIECES="40", FAKE_DELAY_S="0.02")
    with httpx.stream(
        "POST", program.url + "/v1/completions", json={"prompt": "x", "stream": True}
    ) as answer:
        lines = answer.iter_lines()
        next(lines)
        program.process.send_signal(signal.SIGTERM)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert program.exit_code() == 0
    assert "shutdown called, 0 unfinished" in program.output


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_does_not_finish_is_told_so(run: Run, stream: bool) -> None:
    program = run("--drain-timeout-s", "0.5", FAKE_PIECES="2", FAKE_HOLD="1")
    answers: list[httpx.Response] = []
    body = {"prompt": "x", "stream": stream}
    url = program.url + "/v1/completions"
    asking = threading.Thread(target=lambda: answers.append(httpx.post(url, json=body, timeout=60)))
    asking.start()
    wait_until(lambda: "submitted" in program.output)
    program.process.send_signal(signal.SIGTERM)
    assert program.exit_code() == 0
    asking.join(10)
    assert answers[0].status_code == (200 if stream else 503)
    assert "stopped this request before its answer was complete" in answers[0].text
    assert "Traceback" not in program.output and "ERROR" not in program.output


def test_new_connections_are_refused_while_draining(run: Run) -> None:
    program = run(FAKE_PIECES="1", FAKE_HOLD="1")
    url = program.url
    with httpx.stream("POST", url + "/v1/completions", json={"prompt": "x", "stream": True}):
        program.process.send_signal(signal.SIGINT)

        def refused() -> bool:
            try:
                return httpx.get(url + "/health").status_code == 503
            except httpx.ConnectError:
                return True

        wait_until(refused)
        assert program.process.poll() is None


@pytest.mark.parametrize("kind", ["idle keep-alive", "half a request", "never reads", "never ends"])
def test_no_client_holds_up_the_exit(run: Run, kind: str) -> None:
    program = run("--drain-timeout-s", "1", FAKE_PIECES="300000", FAKE_HOLD="1")
    url = httpx.URL(program.url)
    with closing(socket.create_connection((url.host, url.port or 0))) as client:
        if kind == "idle keep-alive":
            client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert client.recv(4096).startswith(b"HTTP/1.1 200")
        elif kind == "half a request":
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"
            )
        else:
            body = b'{"prompt": "x", "stream": true}'
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                + b"Content-Length: %d\r\n\r\n" % len(body)
                + body
            )
            assert client.recv(4096).startswith(b"HTTP/1.1 200")
        if kind == "never ends":
            threading.Thread(target=read_all, args=(client,), daemon=True).start()
        program.process.send_signal(signal.SIGTERM)
        # Far below the bound of a server that waits for such clients, far above what a loaded machine needs.
        assert program.exit_code(40) == 0
    assert "shutdown called" in program.output and "Traceback" not in program.output


def read_all(client: socket.socket) -> None:
    """Reads until the other side is gone."""
    try:
        while client.recv(1 << 16):
            pass
    except OSError:
        return  # cut by the server, as it should


def test_a_second_signal_ends_at_once(run: Run) -> None:
    program = run("--drain-timeout-s", "600", FAKE_PIECES="1", FAKE_HOLD="1")
    with httpx.stream("POST", program.url + "/v1/completions", json={"prompt": "x", "stream": True}):
        program.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "Stopping" in program.output)
        program.process.send_signal(signal.SIGTERM)
        assert program.exit_code() == 128 + signal.SIGTERM
    assert "shutdown called" not in program.output


def test_a_signal_while_loading_ends_at_once(run: Run) -> None:
    program = run(FAKE_LOAD_S="600")
    wait_until(lambda: "Loading" in program.output, 30)
    program.process.send_signal(signal.SIGTERM)
    assert program.exit_code() == 128 + signal.SIGTERM


def test_an_engine_that_hangs_cannot_hold_up_the_exit(run: Run) -> None:
    program = run("--drain-timeout-s", "0", "--demote-timeout-s", "0", FAKE_SHUTDOWN_HANGS="1")
    assert program.url
    program.process.send_signal(signal.SIGTERM)
    assert program.exit_code() == 1
    assert "the stop took longer than 10 s" in program.output


def test_a_port_in_use_is_said_before_the_model_is_loaded(run: Run) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as other:
        port = other.getsockname()[1]
        program = run("--port", str(port), FAKE_LOAD_S="600")
        assert program.exit_code() == 1
    assert f"error: --port {port} on 127.0.0.1 is in use by process {os.getpid()} (" in program.output
    assert "free now: --port" in program.output
    assert "Loading" not in program.output and "Traceback" not in program.output


def test_a_port_that_was_taken_while_loading(run: Run) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as probe:
        port = probe.getsockname()[1]
    first = run("--port", str(port), FAKE_LOAD_S="1")
    wait_until(lambda: "Loading" in first.output, 30)
    second = run("--port", str(port), FAKE_LOAD_S="1")
    codes = []

    def one_ended() -> bool:
        codes[:] = [program.process.poll() for program in (first, second)]
        return any(code is not None for code in codes)

    wait_until(one_ended, 60)
    assert sorted(codes, key=str) == [1, None]
    loser, winner = (first, second) if codes[0] == 1 else (second, first)
    assert loser.exit_code() == 1
    assert f"--port {port} on 127.0.0.1 is in use" in loser.output and "Traceback" not in loser.output
    assert httpx.get(winner.url + "/health").status_code == 200


def test_a_model_that_cannot_be_loaded_is_one_sentence() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv.pop(1)); from strata.serve.__main__ import main;"
        "from fake_engine import UnloadableEngine; sys.exit(main(load=UnloadableEngine))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, str(HERE), "--port", "0", "--model", "nowhere", "--disk-capacity", "0"],
        env={**os.environ, "PYTHONPATH": str(PACKAGE)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 1
    assert ended.stderr == "error: --model nowhere does not exist; give a folder\n"


def test_the_strata_command_runs_the_server() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "strata.cli.main", "serve", "--page-size", "0"],
        env={**os.environ, "PYTHONPATH": str(PACKAGE)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 1
    assert ended.stderr.startswith("error: --page-size 0 is not a whole number from 1 to 256")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [(["--help"], 0, "serve"), (["sreve"], 2, "'sreve' is no command"), ([], 2, "no command given")],
)
def test_the_strata_command_alone(
    arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert strata_command(arguments) == code
    written = capsys.readouterr()
    assert words in (written.err if code else written.out)


def test_an_event_loop_that_is_stuck_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "_STUCK_S", 0.5)
    goes_on, options = threading.Event(), ServerOptions(port=0)

    async def blocks(scope: Any, receive: Any, send: Any) -> None:
        goes_on.wait(20)

    with bind(options) as bound:
        listen(bound, options)
        http = lifecycle.HttpThread(options, bound)
        http.start()
        assert http.moves
        http._gate.open(blocks)
        asking = threading.Thread(target=httpx.get, args=(url_of(bound),), daemon=True)
        asking.start()
        wait_until(lambda: not http.moves)
        goes_on.set()
        wait_until(lambda: http.moves)
        http.stop(5.0)
        asking.join(10)
