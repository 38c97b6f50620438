"""A server on a free port of this machine with a fake engine behind it, and ways to talk to it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
import uvicorn
from fake_engine import FakeEngine

from strata.config import StrataConfig
from strata.serve.app import create_app
from strata.serve.binding import bind, url_of
from strata.serve.connections import http_config


@dataclass
class RunningServer:
    """Serves from the moment it is made; settings are those of `StrataConfig.of`."""

    settings: dict[str, Any] = field(default_factory=dict)
    engine: Any = None
    """A fake one unless given; not shut down here."""

    def __post_init__(self) -> None:
        config = StrataConfig.of(**{"port": 0, "disk_capacity": 0, **self.settings})
        self.engine = self.engine or FakeEngine(config)
        self._bound = bind(config.server)
        self._server = uvicorn.Server(http_config(create_app(self.engine, config), config.server, 1))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._bound]})
        self._thread.start()
        self.url = url_of(self._bound)
        self.http = httpx.Client(base_url=self.url, timeout=20)
        key = next(iter(config.server.api_key), "none")
        self.openai = openai.OpenAI(base_url=self.url + "/v1", api_key=key, max_retries=0, timeout=20)
        wait_until(lambda: self._server.started)

    @property
    def connections(self) -> set[Any]:
        """Those that are open on the server's side."""
        return self._server.server_state.connections

    def stop(self) -> None:
        """Ends the server and its clients."""
        self.http.close()
        self.openai.close()
        self._server.should_exit = True
        self._thread.join(10)
        self._bound.close()
        assert not self._thread.is_alive()


def wait_until(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    """Returns once `condition` holds; fails the test if it never does."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come about"
        time.sleep(0.01)
