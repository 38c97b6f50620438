"""What the operator reads: coloured on a terminal, plain lines anywhere else, flushed line by line; with
`--log-format json` the same sentences as lines of the log."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping

from rich.console import Console
from rich.text import Text

from strata.serve.logs import fields

_log = logging.getLogger("strata.serve")


class Terminal:
    """Writes lines to standard output, or logs them."""

    def __init__(self, steps: int, log: bool = False) -> None:
        self._console = Console(file=sys.stdout, soft_wrap=True, highlight=False, markup=False, emoji=False)
        self._log = log
        self._steps = steps
        self._step = 0

    def step(self, sentence: str) -> None:
        """A numbered step of what is going on now."""
        self._step += 1
        self._write(Text.assemble((f"[{self._step}/{self._steps}] ", "bold cyan"), sentence))

    def row(self, name: str, sentence: str, style: str = "") -> None:
        """A named fact, aligned with the others."""
        self._write(Text.assemble((f"  {name:<8}", "bold"), (sentence, style)))

    def line(self, sentence: str = "", style: str = "", numbers: Mapping[str, int] | None = None) -> None:
        """A line of its own; in a log of JSON it has `numbers` as fields."""
        self._write(Text(sentence, style=style), numbers)

    def _write(self, text: Text, numbers: Mapping[str, int] | None = None) -> None:
        if self._log:
            if sentence := " ".join(text.plain.split()):
                _log.info("%s", sentence, extra=fields(**(numbers or {})))
            return
        self._console.print(text)
        sys.stdout.flush()
