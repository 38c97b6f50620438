"""A file of what each step computed and how long it took, one JSON object a line, for `strata.simulate.profile`.

The engine's thread puts a line into a bounded buffer and goes on; a thread of the log writes. Lines that find the
buffer full are left out and counted in the last line. The first line says which server it was, lines of `transfers`
what each kind of transfer has moved so far.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from strata._core import Plan
from strata.config import StrataConfig
from strata.engine.runtime_options import PoolSizes
from strata.engine.served_model import ServedModel
from strata.errors import ConfigError

VERSION = 1
"""Of the lines' form; raised when a reader of the old form would misunderstand the new one."""

TRANSFERS = ("load", "backup", "spill", "prefetch")
_FIELDS = ("completed", "bytes", "busy_ns")
_MOST_LINES = 1 << 16
_EVERY_S = 0.5
_JOIN_S = 5.0
_log = logging.getLogger("strata.engine")

Stats = Callable[[], Mapping[str, float]]


class StepLog:
    """One file, written from `start` to `close`. Nothing is written for an empty path. `note` is for one thread."""

    def __init__(self, path: str) -> None:
        """Opens the file anew. Raises ConfigError if it cannot be written."""
        self._path = path
        self._buffer: deque[dict[str, Any]] = deque()
        self._left_out = 0
        self._moved: dict[str, dict[str, float]] = {}
        self._closing = threading.Event()
        self._began = time.monotonic()
        self._thread: threading.Thread | None = None
        if not path:
            return
        try:
            self._file = Path(path).expanduser().open("w", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"--step-log {path} cannot be written: {error.strerror or error}; name a file in a folder that exists "
                "and is yours, or leave the flag out"
            ) from error

    def start(self, header: Mapping[str, Any], stats: Stats) -> None:
        """Writes the first line and starts the thread. `stats` gives the counters of transfers; it may be called until
        `close` returns."""
        if not self._path:
            return
        self._buffer.appendleft({"log": "strata steps", "version": VERSION, **header})
        self._thread = threading.Thread(target=self._run, args=(stats,), name="strata-step-log", daemon=True)
        self._thread.start()

    def note(self, plan: Plan, began: float, sampled: int, busy_s: float, stalled_s: float) -> None:
        """One step that is over, reported and streamed. `began` is `time.monotonic`'s. `context` are tokens before
        those that are computed, `pairs` those of a computed token and one that it attends to, `loaded_tokens` what
        requests that begin here find below the device; all are sums over the rows. `rest_s` follows the step."""
        if not self._path:
            return
        if len(self._buffer) >= _MOST_LINES:
            self._left_out += 1
            return
        rows = list(zip(plan.query_lengths, plan.context_lengths, strict=True))
        self._buffer.append(
            {
                "kind": "prefill" if plan.is_prefill else "decode",
                "at_s": began - self._began,
                "rows": len(rows),
                "tokens": sum(tokens for tokens, _ in rows),
                "context": sum(whole - tokens for tokens, whole in rows),
                "pairs": sum(
                    tokens * (whole - tokens) + tokens * (tokens + 1) // 2 for tokens, whole in rows
                ),
                "sampled": sampled,
                "loaded_tokens": sum(host + disk for _, _, host, disk, _, _ in plan.admitted),
                "busy_s": busy_s,
                "stalled_s": stalled_s,
                "rest_s": time.monotonic() - began - busy_s - stalled_s,
            }
        )

    def close(self) -> None:
        """Writes what is left and closes the file. Idempotent; bounded, however slow the disk is."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(_JOIN_S)
        elif self._path and not self._file.closed:
            self._file.close()

    def _run(self, stats: Stats) -> None:
        try:
            with self._file:
                ends = False
                while not ends:
                    ends = self._closing.wait(_EVERY_S)
                    self._note_transfers(stats)
                    self._write(ends)
        except Exception:  # noqa: BLE001 - a full disk must not end the server; nobody else would tell
            _log.exception("--step-log %s: writing has stopped", self._path)

    def _note_transfers(self, stats: Stats) -> None:
        found = stats()
        moved = {kind: {field: found.get(f"{kind}_{field}", 0) for field in _FIELDS} for kind in TRANSFERS}
        if moved != self._moved:
            self._moved = moved
            self._buffer.append({"kind": "transfers", "at_s": time.monotonic() - self._began, **moved})

    def _write(self, ends: bool) -> None:
        lines = []
        while self._buffer:
            lines.append(json.dumps(self._buffer.popleft()))
        if ends:
            lines.append(json.dumps({"kind": "end", "left_out": self._left_out}))
        self._file.writelines(f"{line}\n" for line in lines)
        self._file.flush()


def header_of(served: ServedModel, sizes: PoolSizes, config: StrataConfig) -> dict[str, Any]:
    """What a reader must know of the server: the model's shape, the tiers' sizes, and the settings that decide how
    steps are formed. No secret, and no folder of this machine."""
    model = served.model.config
    cache = {name: value for name, value in asdict(config.cache).items() if name != "disk_path"}
    return {
        "model": {"name": served.name, "layers": model.layers, "hidden_size": model.hidden_size},
        "dtype": str(served.model.dtype).removeprefix("torch."),
        "page_bytes": sizes.page_bytes,
        "pages": {
            "device": sizes.device_pages,
            "host": sizes.host_pages,
            # The disk is opened in the background: what it may hold, not what is open by now.
            "disk": config.cache.disk_capacity // sizes.page_bytes,
        },
        "copy_threads": sizes.copy_threads,
        "settings": {"cache": cache, "scheduler": asdict(config.scheduler), "threads": config.model.threads},
    }
