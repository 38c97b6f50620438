"""Records of data sets one after the other: a large file is never held in memory as a whole, and a complaint names the
file, the line, the field and the remedy."""

from __future__ import annotations

import csv
import importlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from strata.errors import ConfigError

_CHUNK = 1 << 20
_LONGEST_RECORD = 256 << 20
"""Characters of one record of an array; what is longer is taken for a file that is broken."""
_PARQUET_ROWS = 64
_GAP = " \t\r\n,"
"""What stands between the elements of an array."""


@dataclass(frozen=True)
class Place:
    """Where a record stands."""

    path: Path
    number: int
    unit: str = "line"

    def refuse(self, what: str, wanted: str) -> ConfigError:
        """The error for a record that cannot be used."""
        return ConfigError(f"{self.path}, {self.unit} {self.number}: {what}; {wanted}")


@dataclass(frozen=True)
class Record:
    """One record: fields by name, and where it stands. `form` says in words what its format is."""

    place: Place
    fields: Mapping[str, Any]
    form: str

    def refuse(self, what: str) -> ConfigError:
        """The error for a field that cannot be used."""
        return self.place.refuse(what, f"each record must be {self.form}: repair it or remove it")

    def text(self, name: str, *, may_be_empty: bool = False) -> str:
        """A field that is a text. Raises ConfigError."""
        value = self.fields.get(name)
        if not isinstance(value, str) or not (may_be_empty or value.strip()):
            raise self.refuse(f"`{name}` is {_shown(value)}, not a text")
        return value

    def items(self, name: str) -> list[Any]:
        """A field that is a list. Raises ConfigError."""
        value = self.fields.get(name)
        if not isinstance(value, list):
            raise self.refuse(f"`{name}` is {_shown(value)}, not a list")
        return value

    def number(self, name: str, least: float) -> float:
        """A field that is a number of at least `least`. Raises ConfigError."""
        value = self.fields.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < float("inf"):
            raise self.refuse(f"`{name}` is {_shown(value)}, not a number of {least:g} or more")
        return value

    def part(self, name: str) -> Record:
        """A field that is an object of its own. Raises ConfigError."""
        value = self.fields.get(name)
        if not isinstance(value, Mapping):
            raise self.refuse(f"`{name}` is {_shown(value)}, not an object")
        return Record(self.place, value, self.form)

    def within(self, name: str, index: int, value: Any) -> Record:
        """An element of the list `name`, which must be an object. Raises ConfigError."""
        if not isinstance(value, Mapping):
            raise self.refuse(f"`{name}[{index}]` is {_shown(value)}, not an object")
        return Record(self.place, value, self.form)


def _shown(value: Any) -> str:
    if value is None:
        return "missing"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def read_records(path: Path, form: str) -> Iterator[Record]:
    """The records of a file: JSON lines, a JSON array, CSV (`.csv`) or Parquet (`.parquet`). Raises ConfigError."""
    readers: Mapping[str, Callable[[Path, str], Iterator[Record]]] = {".csv": _csv, ".parquet": _parquet}
    yield from readers.get(path.suffix.lower(), _json)(path, form)


def _unreadable(path: Path, error: Exception, form: str) -> ConfigError:
    return ConfigError(f"{path} cannot be read: {error}; give a file whose records are {form}")


def _json(path: Path, form: str) -> Iterator[Record]:
    try:
        with path.open(encoding="utf-8") as file:
            first, line = file.read(1), 1
            while first.isspace():
                first, line = file.read(1), line + (first == "\n")
            if first == "[":
                yield from _array(file, path, form, line)
                return
            file.seek(0)
            yield from _lines(file, path, form)
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error, form) from error


def _record(place: Place, value: Any, form: str) -> Record:
    if not isinstance(value, dict):
        raise place.refuse(f"a JSON {type(value).__name__}, not an object", f"each record must be {form}")
    return Record(place, value, form)


def _lines(file: IO[str], path: Path, form: str) -> Iterator[Record]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        place = Place(path, number)
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise place.refuse(f"no JSON ({error})", f"each line must be {form}") from error
        yield _record(place, value, form)


def _array(file: IO[str], path: Path, form: str, line: int) -> Iterator[Record]:
    """The elements of an array whose bracket, in this line, was read."""
    decoder = json.JSONDecoder()
    text, start = "", 0
    while True:
        while text[start : start + 1] in _GAP and start < len(text):
            line, start = line + (text[start] == "\n"), start + 1
        if text.startswith("]", start):
            return
        place = Place(path, line)
        try:
            value, end = decoder.raw_decode(text, start)
        except json.JSONDecodeError as error:
            text, start = text[start:], 0
            more = file.read(max(_CHUNK, len(text)))
            if not more or len(text) > _LONGEST_RECORD:
                wanted = f"the file must be a JSON array whose elements are {form}"
                raise place.refuse(f"no JSON ({error.msg})", wanted) from error
            text += more
            continue
        yield _record(place, value, form)
        line, start = line + text.count("\n", start, end), end


def _csv(path: Path, form: str) -> Iterator[Record]:
    csv.field_size_limit(min(sys.maxsize, _LONGEST_RECORD))
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            for row in reader:
                place = Place(path, reader.line_num)
                if None in row or None in row.values():
                    raise place.refuse(
                        f"not the {len(reader.fieldnames or ())} fields of the header",
                        f"each record must be {form}: repair it or remove it",
                    )
                yield Record(place, row, form)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise _unreadable(path, error, form) from error


def _parquet(path: Path, form: str) -> Iterator[Record]:
    try:
        # Nobody else needs it, and it is large.
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ConfigError(
            f"{path} is Parquet, and pyarrow is not installed ({error}): pip install pyarrow, or give JSON lines"
        ) from error
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_PARQUET_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    yield Record(Place(path, number, "row"), row, form)
    except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
        raise _unreadable(path, error, form) from error
