"""From settings to exit code: bind, load, serve, stop. Every stop ends within a bound.

The address answers from the start, until the model is there with 503. The first SIGTERM or SIGINT makes `/ready` say
no, takes requests for another `--leave-notice-s`, then no new connections, lets running requests finish within
`--drain-timeout-s`, moves pages to disk within `--demote-timeout-s` and exits with 0. A second one, or one while the
model is loading, exits at once. HTTP runs in a thread of its own, so that no client can keep the main thread from
stopping.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType

import uvicorn

from strata.config import ServerOptions, StrataConfig
from strata.engine.api import EngineProtocol
from strata.errors import StrataError
from strata.serve.app import create_app
from strata.serve.banner import show_ready
from strata.serve.binding import bind, listen, place_of, url_of
from strata.serve.connections import allow_open_files, http_config
from strata.serve.gate import Gate
from strata.serve.logs import set_up_logging
from strata.serve.service import Service
from strata.serve.supervisor import Supervisor
from strata.serve.terminal import Terminal

_log = logging.getLogger("strata.serve")

LoadEngine = Callable[[StrataConfig], EngineProtocol]

GRACE_S = 10.0
"""What a stop may take beyond the two timeouts, before the process ends whatever hangs."""
_ABORT_S = 2.0
"""The part of it in which aborted requests may end and tell their clients."""
_TICK_S = 0.1
_START_TIMEOUT_S = 30.0
_NOT_WRITTEN = ", not written to disk within --demote-timeout-s {:g} or without room there (--disk-capacity)"
_STUCK_S = 10.0
"""An event loop that has not gone on for so long does not live."""


def run_server(config: StrataConfig, load_engine: LoadEngine) -> int:
    """Serves until a signal asks to stop. Returns the exit code; raises StrataError if it cannot start."""
    set_up_logging(config.server)
    terminal = Terminal(steps=3, log=config.server.log_format == "json")
    signals = StopSignals()
    signals.install()
    allow_open_files(config.server)
    with bind(config.server) as bound:
        terminal.step(f"Address {url_of(bound)} is free")
        listen(bound, config.server)
        http = HttpThread(config.server, bound)
        http.start()
        terminal.step(f"Loading model {config.model.model} and opening the cache's tiers")
        start = time.monotonic()
        try:
            engine = load_engine(config)
        except BaseException:
            http.stop(_ABORT_S)
            raise
        try:
            http.serve(engine, config)
            signals.may_drain = True
            show_ready(terminal, engine, config, bound, time.monotonic() - start)
            supervisor = Supervisor()
            supervisor.ready(f"serving {engine.model_name} on {place_of(bound)}")
            while not signals.requested and http.alive:
                supervisor.alive(lambda: engine.health().ok and http.moves)
                time.sleep(_TICK_S)
            supervisor.stopping("finishing running requests")
        except BaseException:
            engine.shutdown(0.0, 0.0)
            raise
        return _stop(engine, http, config, terminal, asked=signals.requested)


def _stop(
    engine: EngineProtocol, http: HttpThread, config: StrataConfig, terminal: Terminal, asked: bool
) -> int:
    """Says that it leaves, drains, demotes and says what became of it."""
    options = config.server
    whole_s = options.leave_notice_s + options.drain_timeout_s + options.demote_timeout_s + GRACE_S
    _end_process_after(whole_s)
    if asked:
        if options.leave_notice_s:
            terminal.line(
                f"Stopping: /ready says no, requests are taken for {options.leave_notice_s:g} s more"
            )
        http.leave(options.leave_notice_s)
        terminal.line(
            f"Stopping: running requests have {options.drain_timeout_s:g} s; a second signal ends at once"
        )
    else:
        _log.error("the HTTP server ended by itself; shutting the engine down")
    start = time.monotonic()
    http.stop(options.drain_timeout_s)
    drain_left_s = max(0.0, options.drain_timeout_s - (time.monotonic() - start))
    problems = [problem for problem in engine.health().problems if problem.startswith("the disk tier")]
    code = 0 if asked else 1
    try:
        done = engine.shutdown(drain_left_s, options.demote_timeout_s)
    except StrataError as error:
        # It has ended all the same, and knows what it moved; the disk could not be closed.
        done, code = engine.shutdown(0.0, 0.0), 1
        problems.append(str(error))
    kept = what_is_kept(done, options.demote_timeout_s, problems)
    terminal.line(
        f"Stopped after {time.monotonic() - start:.1f} s" + (f": {kept}" if kept else ""), numbers=done
    )
    return code


def what_is_kept(done: Mapping[str, int], demote_timeout_s: float, problems: Sequence[str] = ()) -> str:
    """In words, from `EngineProtocol.shutdown`'s report: which pages the next start finds, which it does not, and what
    was wrong with the disk (`problems`). Empty where there was nothing to keep, or no disk is wanted to keep it on."""
    disk = done.get("disk_resident_pages", 0)
    # Some of these may be on disk too: a page above stays with all pages before it.
    left = done.get("device_resident_pages", 0) + done.get("host_resident_pages", 0)
    kept = f"{_pages(disk)} on disk" + ("" if problems else ", the next start is warm")
    lost = f"up to {_pages(left)} lost" + ("" if problems else _NOT_WRITTEN.format(demote_timeout_s))
    return "; ".join([kept] * bool(disk) + [lost] * bool(left) + list(problems))


def _pages(count: int) -> str:
    return "1 page is" if count == 1 else f"{count:,} pages are"


class HttpThread:
    """uvicorn on a listening socket, in a daemon thread."""

    def __init__(self, options: ServerOptions, bound: socket.socket) -> None:
        self._gate = Gate()
        self._service: Service | None = None
        self._bound = bound
        self._server = _TickingServer(
            http_config(self._gate, options, math.ceil(options.drain_timeout_s + _ABORT_S / 2))
        )
        logging.getLogger("uvicorn.error").addFilter(_is_no_cancellation)
        # uvicorn leaves signals alone outside the main thread.
        self._thread = threading.Thread(target=self._run, name="strata-http-loop", daemon=True)

    @property
    def alive(self) -> bool:
        """Whether requests are answered."""
        return self._thread.is_alive()

    @property
    def moves(self) -> bool:
        """Whether the event loop goes on: one that is stuck answers nobody, probes neither."""
        return time.monotonic() - self._server.ticked < _STUCK_S

    def start(self) -> None:
        """Returns once the address answers. Raises StrataError if that does not come about."""
        self._thread.start()
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not self._server.started:
            if not self.alive or time.monotonic() > deadline:
                raise StrataError("the HTTP server did not start; the log above says why")
            time.sleep(0.01)

    def serve(self, engine: EngineProtocol, config: StrataConfig) -> None:
        """From now on requests are answered by `engine`."""
        app = create_app(engine, config)
        self._service = app.state.service
        self._gate.open(app)

    def leave(self, notice_s: float) -> None:
        """Says under `/ready` that nobody should come any more, and goes on answering for `notice_s` seconds."""
        if self._service is not None:
            self._service.leaving.set()
        self._gate.leave()
        deadline = time.monotonic() + notice_s
        while self.alive and time.monotonic() < deadline:
            time.sleep(_TICK_S)

    def stop(self, timeout_s: float) -> None:
        """Takes no new connections and waits for running requests.

        Those that take longer are aborted, which their clients are told; what still does not end is cut.
        """
        self._server.should_exit = True
        self._thread.join(timeout_s)
        if self.alive and self._service is not None:
            self._service.abort_streams()
            self._thread.join(_ABORT_S)
        if self.alive:
            _log.warning("connections are still open %.1f s after the stop and are cut", timeout_s + _ABORT_S)
            self._server.force_exit = True
        if self._service is not None:
            self._service.close()

    def _run(self) -> None:
        self._server.run(sockets=[self._bound])


class _TickingServer(uvicorn.Server):
    """uvicorn calls `on_tick` ten times a second."""

    ticked = 0.0

    async def on_tick(self, counter: int) -> bool:
        self.ticked = time.monotonic()
        return await super().on_tick(counter)


class StopSignals:
    """SIGTERM and SIGINT. The handler takes no lock: it may interrupt the main thread anywhere."""

    def __init__(self) -> None:
        self.requested = False
        self.may_drain = False
        """Whether there is anything to finish; before that, a signal ends the process."""

    def install(self) -> None:
        """Takes both signals over. Only the main thread may do so."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested or not self.may_drain:
            _end_process(128 + number)
        self.requested = True


def _is_no_cancellation(record: logging.LogRecord) -> bool:
    """False for a request that a stop cancelled: uvicorn shows those as defects, with a traceback."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


def _end_process_after(seconds: float) -> None:
    """Ends the process, whatever still hangs, unless it has ended by then."""

    def end() -> None:
        _log.error("the stop took longer than %.0f s; ending now, pages not yet on disk are lost", seconds)
        _end_process(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


def _end_process(code: int) -> None:
    """Without waiting for threads; the disk tier is made to survive that."""
    try:
        sys.stdout.flush()
    finally:
        os._exit(code)
