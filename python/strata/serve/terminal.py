"""What the operator reads: coloured on a terminal, plain lines anywhere else, flushed line by line."""

from __future__ import annotations

import logging
import sys

from rich.console import Console
from rich.text import Text


class Terminal:
    """Writes lines to standard output."""

    def __init__(self, steps: int) -> None:
        self._console = Console(file=sys.stdout, soft_wrap=True, highlight=False, markup=False, emoji=False)
        self._steps = steps
        self._step = 0

    def step(self, sentence: str) -> None:
        """A numbered step of what is going on now."""
        self._step += 1
        self._write(Text.assemble((f"[{self._step}/{self._steps}] ", "bold cyan"), sentence))

    def row(self, name: str, sentence: str, style: str = "") -> None:
        """A named fact, aligned with the others."""
        self._write(Text.assemble((f"  {name:<8}", "bold"), (sentence, style)))

    def line(self, sentence: str = "", style: str = "") -> None:
        """A line of its own."""
        self._write(Text(sentence, style=style))

    def _write(self, text: Text) -> None:
        self._console.print(text)
        sys.stdout.flush()


def set_up_logging(level: str) -> None:
    """Sends the log messages of Strata to standard output; libraries are heard from warnings on."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(_Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("strata").setLevel(level.upper())


class _Formatter(logging.Formatter):
    """Names the level only where it is a reason to look up."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        if record.levelno >= logging.WARNING:
            record.message = f"{record.levelname}: {record.message}"
        return super().formatMessage(record)
