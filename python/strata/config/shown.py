"""All settings as they came out, each with where it was given: a TOML file that `--config` reads back, or JSON.

A secret is never shown, only whether it is set.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strata.config.environment import variable_of
from strata.config.knobs import Knob, flag_of, format_size, knobs_of, parse_size

HIDDEN = "(set, not shown)"


@dataclass(frozen=True)
class ShownSetting:
    """One setting: its value, or whether it has one, and where it comes from in words."""

    name: str
    knob: Knob
    value: Any
    origin: str

    @property
    def hidden(self) -> bool:
        """Whether there is a value that nobody may see."""
        return self.knob.secret and bool(self.value)


def as_toml(parts: Mapping[str, list[ShownSetting]]) -> str:
    """One line a setting, its origin behind it."""
    lines = []
    for part, settings in parts.items():
        lines.append(f"# {part}")
        for setting in settings:
            key = setting.name.replace("_", "-")
            line = f"# {key} is {HIDDEN}" if setting.hidden else f"{key} = {_toml(setting)}"
            lines.append(f"{line:<44} # {setting.origin}")
        lines.append("")
    return "\n".join(lines)


def as_json(parts: Mapping[str, list[ShownSetting]]) -> str:
    """An object a part, in it one a setting: value (sizes in bytes), origin, flag, variable."""
    body = {
        part: {
            setting.name.replace("_", "-"): {
                "value": HIDDEN if setting.hidden else _plain(setting.value),
                "origin": setting.origin,
                "flag": flag_of(setting.name),
                "variable": variable_of(setting.name),
            }
            for setting in settings
        }
        for part, settings in parts.items()
    }
    return json.dumps(body, indent=2, ensure_ascii=False)


FORMATS: Mapping[str, Callable[[Mapping[str, list[ShownSetting]]], str]] = {"toml": as_toml, "json": as_json}
"""What `--print-config` takes."""


def shown_settings(options: Any, origin: Callable[[str], str]) -> list[ShownSetting]:
    """Every setting of one options object, in the order in which the help has them."""
    return [
        ShownSetting(name, knob, getattr(options, name), origin(name))
        for name, (_, knob) in knobs_of(type(options)).items()
    ]


def _toml(setting: ShownSetting) -> str:
    """The value as TOML; a size that is a round number of its unit in that unit."""
    value = setting.value
    if setting.knob.read is parse_size and parse_size(format_size(value)) == value:
        return json.dumps(format_size(value).replace(" ", "") if value else "0")
    return json.dumps(_plain(value), ensure_ascii=False)


def _plain(value: Any) -> Any:
    """The value as JSON has it."""
    if isinstance(value, Path):
        return str(value)
    return list(value) if isinstance(value, tuple) else value
