"""Tool calls in a model's text, as Hermes and Qwen models write them: `<tool_call>{"name": ..., "arguments": {...}}
</tool_call>`. What is no whole, readable call stays text; nothing is lost.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, field
from typing import Any

_ID_LETTERS = 9
"""As many as Mistral's chat templates want; to others it is all the same."""
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class ToolCall:
    """One call of one answer, as OpenAI spells it; `arguments` is JSON text."""

    name: str
    arguments: str
    call_id: str = field(default_factory=lambda: uuid.uuid4().hex[:_ID_LETTERS])

    def body(self) -> dict[str, Any]:
        """OpenAI's object."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.call_id, "type": "function", "function": function}


class ToolCallParser:
    """Parts the text of one answer, as it comes, into text to show and calls."""

    def __init__(self) -> None:
        self._pending = ""
        self._after_call = False
        """Whether nothing came since a call: line breaks between calls are no answer."""
        self.calls = 0
        """Calls found so far."""

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """What is certain by now: the text to show, and the calls that are complete."""
        self._pending += text.lstrip("\n") if self._after_call and not self._pending else text
        shown, calls = "", []
        while (start := self._pending.find(_OPEN)) >= 0:
            end = self._pending.find(_CLOSE, start)
            if end < 0:
                break
            call = _read(self._pending[start + len(_OPEN) : end])
            shown += self._pending[:start] if call else self._pending[: end + len(_CLOSE)]
            self._pending = self._pending[end + len(_CLOSE) :]
            if call:
                calls.append(call)
                self._pending = self._pending.lstrip("\n")
            self._after_call = call is not None
        keep = self._pending[start:] if start >= 0 else _beginning_of_open(self._pending)
        certain = self._pending[: len(self._pending) - len(keep)]
        shown, self._pending = shown + certain, keep
        self._after_call = self._after_call and not certain
        self.calls += len(calls)
        return shown, calls

    def finish(self) -> tuple[str, list[ToolCall]]:
        """What is left at the end of the answer: a call that only lacks its end mark counts."""
        rest, self._pending = self._pending, ""
        call = _read(rest.removeprefix(_OPEN)) if rest.startswith(_OPEN) else None
        self.calls += call is not None
        return ("", [call]) if call else (rest, [])


def _beginning_of_open(text: str) -> str:
    """The end of `text` that may be the beginning of a call."""
    for size in range(min(len(text), len(_OPEN) - 1), 0, -1):
        if text.endswith(_OPEN[:size]):
            return text[-size:]
    return ""


def _read(text: str) -> ToolCall | None:
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", {})
    # Some models write the arguments as text that holds JSON already.
    return ToolCall(call["name"], arguments if isinstance(arguments, str) else json.dumps(arguments))
