"""Says in the log what the disk tier is, and says it again whenever that changes: taken by others, failing, back."""

from __future__ import annotations

import logging
import re
import time

from strata._core import Runtime

OFF_BY_CHOICE = ("--", "it was detached")
"""How reasons begin that are no problem: the disk tier is off because somebody wanted it."""
_log = logging.getLogger("strata.engine")
_EVERY_S = 1.0
_SECONDS = re.compile(r"[0-9.]+ s\b")


class DiskLog:
    """Looks at most once a second, however often it is asked to. For one thread."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._said = ""
        self._looked_at = 0.0

    def look(self) -> None:
        """Logs what has changed since the last look."""
        now = time.monotonic()
        if now < self._looked_at + _EVERY_S:
            return
        self._looked_at = now
        engine, problem = self._runtime.disk_state()
        # The seconds of a hang or of a retry are no news.
        state = _SECONDS.sub("", f"{engine}|{problem}")
        if state == self._said:
            return
        self._said = state
        if engine is None:
            chosen = problem is not None and problem.startswith(OFF_BY_CHOICE)
            _log.log(logging.INFO if chosen else logging.WARNING, "the disk tier is off: %s", problem)
        elif problem is not None:
            _log.warning("the disk tier (%s) is %s", engine, problem)
        else:
            _log.info("the disk tier: %s", engine)
