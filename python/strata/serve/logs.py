"""What is logged, and in which form: lines for people, or one JSON object a line with the same content in fields.

Libraries are heard from warnings on, Python's own warnings included, and write in the same form. Nothing that a client
sent is ever logged but its `X-Request-Id`, and no key.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from types import TracebackType
from typing import Any

from strata.config import ServerOptions
from strata.serve.request_id import current_request_id

_FIELDS = "strata_fields"
_log = logging.getLogger("strata")


def fields(**values: Any) -> dict[str, dict[str, Any]]:
    """For the `extra` of a log call: values that JSON shows by name, beside the sentence."""
    return {_FIELDS: values}


def set_up_logging(options: ServerOptions) -> None:
    """Sends everything that is logged to standard output, in the form that the options ask for."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(JsonFormatter() if options.log_format == "json" else TextFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("strata").setLevel(options.log_level.upper())
    logging.captureWarnings(True)
    if options.log_format == "json":
        sys.excepthook = _log_uncaught
        threading.excepthook = lambda thrown: _log_uncaught(
            thrown.exc_type, thrown.exc_value, thrown.exc_traceback
        )


class TextFormatter(logging.Formatter):
    """`12:34:56 sentence`; names the level only where it is a reason to look up."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        if record.levelno >= logging.WARNING:
            record.message = f"{record.levelname}: {record.message}"
        return super().formatMessage(record)


class JsonFormatter(logging.Formatter):
    """One object a line: `time` (UTC), `level`, `logger`, `message`, then what there is of `request_id`, the line's own
    fields and `exception`."""

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{seconds}.{int(record.created % 1 * 1000):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request := current_request_id():
            line["request_id"] = request
        line |= getattr(record, _FIELDS, {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        # All ASCII: some readers take U+2028 and its like for the end of a line.
        return json.dumps(line, default=str)


def _log_uncaught(
    kind: type[BaseException], error: BaseException | None, traceback: TracebackType | None
) -> None:
    _log.error("ended by an error that nobody caught", exc_info=(kind, error or kind(), traceback))
