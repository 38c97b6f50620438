"""How one setting is documented, read from text and checked. Every complaint is a `ConfigError` that names
the setting, its value, the flag and the remedy."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, fields
from datetime import date
from pathlib import Path
from typing import Any

from strata.errors import ConfigError

KNOB = "knob"
"""Key of the `Knob` in a dataclass field's metadata."""

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{letter}iB": 1 << (10 * power) for power, letter in enumerate("KMGT", start=1)}
_UNITS |= {f"{letter}B": 1000**power for power, letter in enumerate("KMGT", start=1)}
_SIZE_MOST = 1 << 60
"""More bytes than any machine has; all of it can be reckoned with."""
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")
_WORDS = {
    "true": True,
    "1": True,
    "yes": True,
    "on": True,
    "false": False,
    "0": False,
    "no": False,
    "off": False,
}


@dataclass(frozen=True)
class Knob:
    """What is known of a setting beside its type and default.

    `read` turns text into a value and raises ValueError; `wanted` says in words what it takes. `least` and
    `most` bound numbers. A `secret` value is never shown. One that takes `several` texts is given them by commas,
    or one after the other behind its flag, or as a list in TOML.
    """

    doc: str
    read: Callable[[str], Any]
    wanted: str
    least: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()
    secret: bool = False
    several: bool = False


def text(doc: str, *, secret: bool = False) -> dict[str, Any]:
    """Metadata of a setting that takes any text."""
    return {KNOB: Knob(doc, str, "some text", secret=secret)}


def texts(doc: str, *, secret: bool = False) -> dict[str, Any]:
    """Metadata of a setting that takes any number of texts without commas; its value is a tuple."""
    return {KNOB: Knob(doc, _read_texts, "texts parted by commas", secret=secret, several=True)}


def path(doc: str) -> dict[str, Any]:
    """Metadata of a setting that takes a folder; `~` is the user's home."""
    return {KNOB: Knob(doc, _read_path, "a folder's path")}


def choice(doc: str, *choices: str) -> dict[str, Any]:
    """Metadata of a setting that takes one of a few words."""
    return {KNOB: Knob(doc, str, f"one of {', '.join(choices)}", choices=choices)}


def switch(doc: str) -> dict[str, Any]:
    """Metadata of a setting that is on or off."""
    return {KNOB: Knob(doc, _read_switch, "true or false")}


def count(doc: str, least: int, most: int) -> dict[str, Any]:
    """Metadata of a setting that takes a whole number from `least` to `most`."""
    return {KNOB: Knob(doc, int, f"a whole number from {least} to {most}", least, most)}


def seconds(doc: str, least: float, most: float) -> dict[str, Any]:
    """Metadata of a setting that takes seconds from `least` to `most`."""
    return {KNOB: Knob(doc, float, f"seconds from {least:g} to {most:g}", least, most)}


def number(doc: str, least: float, most: float) -> dict[str, Any]:
    """Metadata of a setting that takes a number from `least` to `most`."""
    return {KNOB: Knob(doc, float, f"a number from {least:g} to {most:g}", least, most)}


def day(doc: str) -> dict[str, Any]:
    """Metadata of a setting that takes a day, or nothing."""
    return {KNOB: Knob(doc, _read_day, "a day such as 2024-07-26")}


def fraction(doc: str) -> dict[str, Any]:
    """Metadata of a setting that takes a part of something, from 0 to 1."""
    return {KNOB: Knob(doc, float, "a part from 0 to 1", 0.0, 1.0)}


def size(doc: str, least: int = 0) -> dict[str, Any]:
    """Metadata of a setting that takes bytes, `8GiB` or `500MB` as well."""
    at_least = f"of at least {format_size(least)}, " if least else ""
    return {KNOB: Knob(doc, parse_size, f"a size {at_least}such as 8GiB", least)}


def parse_size(value: str) -> int:
    """Bytes in a text such as `8GiB`, `500MB`, `4096` or `0`. Raises ValueError."""
    found = _SIZE.fullmatch(value.strip())
    if found is None:
        raise ValueError(f"{value!r} is not a size")
    units = {name.lower(): factor for name, factor in _UNITS.items()}
    factor = units.get(found[2].lower())
    if factor is None:
        raise ValueError(f"{found[2]!r} is not a unit of size")
    size = float(found[1]) * factor
    if size > _SIZE_MOST:
        raise ValueError(f"{value!r} is more than any machine has")
    return int(size)


def format_size(value: int) -> str:
    """A size in its largest fitting binary unit, such as `1.5 GiB`."""
    amount = float(value)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(amount) < 1024:
            return f"{amount:.{0 if unit == 'B' or amount.is_integer() else 1}f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def flag_of(name: str) -> str:
    """The flag that sets the field `name`."""
    return "--" + name.replace("_", "-")


def knobs_of(part: type) -> Mapping[str, tuple[Field[Any], Knob]]:
    """Each field of an options class, by name, with what is known of it."""
    return {field.name: (field, field.metadata[KNOB]) for field in fields(part)}


def read_value(name: str, knob: Knob, value: str, origin: str) -> Any:
    """Turns text from `origin` (a flag, a variable, a file) into a value. Raises ConfigError."""
    try:
        return knob.read(value)
    except ValueError as error:
        shown = "" if knob.secret else f" {value!r}"
        raise ConfigError(
            f"{flag_of(name)}{shown} (from {origin}) is not {knob.wanted}; {_remedy(name, knob)}"
        ) from error


def check_part(options: Any) -> None:
    """Checks every field of an options object against its knob. Raises ConfigError."""
    for name, (_, knob) in knobs_of(type(options)).items():
        value = getattr(options, name)
        if knob.several and isinstance(value, str):
            raise ConfigError(f"{flag_of(name)} is one text; give a tuple of texts, such as ('...',)")
        below = knob.least is not None and not value >= knob.least
        above = knob.most is not None and not value <= knob.most
        if below or above or (knob.choices and value not in knob.choices):
            raise ConfigError(f"{flag_of(name)} {value!r} is not {knob.wanted}; {_remedy(name, knob)}")


def _remedy(name: str, knob: Knob) -> str:
    return f"give {knob.wanted}, or leave {flag_of(name)} out for the default"


def _read_texts(value: str) -> tuple[str, ...]:
    return tuple(part for part in map(str.strip, value.split(",")) if part)


def _read_path(value: str) -> Path:
    if not value or "\0" in value:
        raise ValueError(f"{value!r} names nothing")
    return expanded(value)


def expanded(path: str) -> Path:
    """A path with `~` as the user's home. Raises ValueError where there is no such home."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ValueError(str(error)) from error


def _read_day(value: str) -> str:
    return date.fromisoformat(value).isoformat() if value else ""


def _read_switch(value: str) -> bool:
    word = value.strip().lower()
    if word not in _WORDS:
        raise ValueError(f"{value!r} is neither true nor false")
    return _WORDS[word]
