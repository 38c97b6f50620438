"""The same questions asked of a real server over HTTP: a process of its own, stopped by SIGTERM and started again.

Times are a client's, from before the request is sent until the first piece of text is read; tokenisation is not in
them, since the prompt goes as token ids.
"""

from __future__ import annotations

import dataclasses
import http.client
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from strata.bench.target import Answer, drop_page_cache, wait_for
from strata.config import StrataConfig
from strata.config.sources import PARTS
from strata.engine import TokenSources
from strata.errors import StorageError, StrataError

_START_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 90.0
_REQUEST_TIMEOUT_S = 600.0
_SERVING = re.compile(r"serving\s+http://([^:\s]+):(\d+)")
_LINES_KEPT = 30


class HttpTarget:
    """Implements `Target` over `python -m strata.serve`."""

    def __init__(self, config: StrataConfig) -> None:
        self._config = config
        self._server = ServerProcess(server_arguments(config))

    def ask(self, token_ids: Sequence[int], max_tokens: int) -> Answer:
        """Asks alone, greedily, for exactly `max_tokens` tokens; the answer's one token is its text."""
        body = {
            "prompt": list(token_ids),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        start = time.perf_counter()
        first: float | None = None
        text: list[str] = []
        usage: dict[str, Any] = {}
        with self._server.request("POST", "/v1/completions", body) as response:
            for event in _events(response):
                if first is None:
                    first = time.perf_counter() - start
                text.extend(choice["text"] for choice in event["choices"])
                usage = event.get("usage") or usage
        if first is None or "strata" not in usage:
            raise StrataError("the server ended the answer without usage.strata; its log says why")
        counts = {tier: usage["strata"][tier] for tier in ("device", "host", "disk", "computed")}
        return Answer(first, ("".join(text),), TokenSources(**counts))

    def settle(self) -> None:
        """Returns once nothing runs, waits or moves."""
        wait_for(self._is_idle, "the server did not come to rest")

    def _is_idle(self) -> bool:
        stats = self._json("GET", "/cache")["stats"]
        return not any(stats[name] for name in ("running", "waiting", "transfers_in_flight"))

    def demote(self, tiers: Sequence[str]) -> None:
        """Empties the tiers downward."""
        self._json("POST", "/cache/demote", {"tiers": list(tiers)})

    def flush(self) -> None:
        """Forgets everything."""
        self._json("POST", "/cache/flush")

    def restart(self) -> None:
        """Stops, then starts anew over the same disk tier; the page cache keeps none of its files."""
        self._server.stop()
        self._server = ServerProcess(server_arguments(self._config))
        drop_page_cache(self._config.cache.disk_path)

    def close(self) -> None:
        """Stops the server."""
        self._server.stop()

    def _json(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        with self._server.request(method, path, body) as response:
            found: dict[str, Any] = json.loads(response.read())
            return found


class ServerProcess:
    """`python -m strata.serve` (or another `module` that runs it) on a free port of this machine. Made, it answers;
    stopped, it has exited with 0."""

    def __init__(self, arguments: Sequence[str], module: str = "strata.serve") -> None:
        command = [sys.executable, "-m", module, "--host", "127.0.0.1", "--port", "0", *arguments]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self._lines: deque[str] = deque(maxlen=_LINES_KEPT)
        self._address: tuple[str, int] | None = None
        self._told = threading.Event()
        # Somebody must read what it prints, or the pipe fills and it waits.
        self._reader = threading.Thread(target=self._read, name="strata-bench-server-output", daemon=True)
        self._reader.start()
        if not self._told.wait(_START_TIMEOUT_S) or self._address is None:
            self._process.kill()
            self._process.wait(_STOP_TIMEOUT_S)
            raise StrataError(f"the server did not start; it said:\n{''.join(self._lines)}")

    def _read(self) -> None:
        output = self._process.stdout
        for line in output if output is not None else ():
            self._lines.append(line)
            found = _SERVING.search(line)
            if found is not None:
                self._address = found[1], int(found[2])
                self._told.set()
        self._told.set()

    @property
    def url(self) -> str:
        """Where it answers. Raises StrataError if it did not start."""
        if self._address is None:
            raise StrataError("the server has no address; it did not start")
        return "http://{}:{}".format(*self._address)

    @property
    def pid(self) -> int:
        """The process's number."""
        return self._process.pid

    @contextmanager
    def request(self, method: str, path: str, body: Any = None) -> Iterator[http.client.HTTPResponse]:
        """The response to one request. Raises StorageError with the server's words unless it is 200."""
        if self._address is None:
            raise StrataError("the server has no address; it did not start")
        connection = http.client.HTTPConnection(*self._address, timeout=_REQUEST_TIMEOUT_S)
        try:
            payload = None if body is None else json.dumps(body)
            connection.request(method, path, payload, {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != http.client.OK:
                words = response.read(2000).decode(errors="replace")
                raise StorageError(f"the server answered {method} {path} with {response.status}: {words}")
            yield response
        except (OSError, http.client.HTTPException) as error:
            said = "".join(self._lines)
            raise StrataError(f"the server broke off {method} {path} ({error}); it said:\n{said}") from error
        finally:
            connection.close()

    def stop(self) -> None:
        """SIGTERM, and the exit code 0 that it promises. Raises StrataError otherwise. Idempotent."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            code = self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            self._process.kill()
            self._process.wait(_STOP_TIMEOUT_S)
            raise StrataError(f"the server did not stop within {_STOP_TIMEOUT_S:g} s") from error
        self._reader.join(_STOP_TIMEOUT_S)
        if code != 0:
            raise StrataError(f"the server exited with {code}; it said:\n{''.join(self._lines)}")


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON objects of a server-sent event stream. Raises StrataError for one that reports an error."""
    for line in response:
        data = line.decode().strip().removeprefix("data:").strip()
        if data == "[DONE]":
            return
        if data:
            event: dict[str, Any] = json.loads(data)
            if "error" in event:
                raise StrataError(f"the server ended the answer with an error: {event['error']}")
            yield event


def server_arguments(config: StrataConfig) -> list[str]:
    """The flags that give another process the same model, cache and scheduler."""
    return [
        text
        for part in PARTS
        if part != "server"
        for field in dataclasses.fields(getattr(config, part))
        for value in [getattr(getattr(config, part), field.name)]
        if value != ""
        for text in (f"--{field.name.replace('_', '-')}", str(value))
    ]
