"""Workloads from the public data sets' own formats: lengths, what prompts share, and order; no text is kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from strata.errors import ConfigError
from strata.simulate.convert.conversations import reviewmt, sharegpt
from strata.simulate.convert.documents import loogle, narrativeqa
from strata.simulate.convert.options import Conversion, Converted
from strata.simulate.convert.tokens import CharacterEstimate, TokenCounter, TokenizerCount, counter_of
from strata.simulate.convert.traces import mooncake

__all__ = [
    "FORMATS",
    "CharacterEstimate",
    "Conversion",
    "Converted",
    "TokenCounter",
    "TokenizerCount",
    "convert",
    "counter_of",
]

FORMATS: Mapping[str, Callable[[Sequence[Path], Conversion], Converted]] = MappingProxyType(
    {
        "loogle": loogle,
        "narrativeqa": narrativeqa,
        "reviewmt": reviewmt,
        "sharegpt": sharegpt,
        "mooncake": mooncake,
    }
)
"""Format -> its reader."""
_MAIN_FIELD = {
    "explicit": ("requests", "requests in their order"),
    "trace": ("records", "requests by arrival"),
}


def convert(form: str, inputs: Sequence[Path], conversion: Conversion) -> dict[str, Any]:
    """A workload as the table of constants has it, with units, sources, notes and statistics, from files of one format.

    `strata.simulate.workloads.workload_file` reads it. Raises ConfigError with file, line and field of what is wrong.
    """
    if form not in FORMATS:
        raise ConfigError(f"--format {form} is unknown; choose one of {', '.join(FORMATS)}")
    for path in inputs:
        if not path.exists():
            raise ConfigError(f"{path} does not exist; give files in the form of --format {form}")
    converted = FORMATS[form](inputs, conversion)
    names = ", ".join(path.name for path in inputs)
    counted = () if form == "mooncake" else (conversion.counter.note,)
    main, unit = _MAIN_FIELD[converted.workload["kind"]]
    fields = dict(converted.workload)
    fields[main] = {"value": fields[main], "unit": unit, "source": f"{form}: {names}"}
    return {
        **fields,
        "statistics": dict(converted.statistics),
        "notes": [*counted, *converted.notes],
    }
