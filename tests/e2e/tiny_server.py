"""The whole server in this process, a real engine over a tiny model behind real HTTP."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from prometheus_client.parser import text_string_to_metric_families

from strata.config import StrataConfig
from strata.engine import Engine
from strata.serve.app import create_app
from strata.serve.binding import bind, url_of

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]
BY_RULE = {"load_policy": "always", "prefetch_policy": "wait"}
"""Settings under which no measured time decides where a prompt's tokens come from."""


class TinyServer:
    """Serves from the moment it is made; settings are those of `StrataConfig.of`."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        config = StrataConfig.of(
            **{
                "model": str(folder),
                "port": 0,
                "threads": 1,
                "device_memory": "64MiB",
                "host_memory": "64MiB",
                "disk_capacity": 0,
                **BY_RULE,
                **settings,
            }
        )
        self.engine = Engine(config)
        self._bound = bind(config.server)
        app = create_app(self.engine, config)
        self._server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off"))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._bound]})
        self._thread.start()
        self.url = url_of(self._bound)
        self.http = httpx.Client(base_url=self.url, timeout=60)
        wait_for(lambda: self._server.started)

    def metrics(self) -> Samples:
        """Every sample of `/metrics` by name and labels."""
        text = self.http.get("/metrics").raise_for_status().text
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def wait_idle(self) -> None:
        """Waits until nothing runs, waits or moves."""
        wait_for(self.engine.check)

    def stop(self) -> None:
        self.http.close()
        self._server.should_exit = True
        self._thread.join(20)
        self._bound.close()
        self.engine.shutdown(0.0, 0.0)
        assert not self._thread.is_alive()


def wait_for(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    """Returns once `condition` holds; fails the test if it never does."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come about"
        time.sleep(0.01)
