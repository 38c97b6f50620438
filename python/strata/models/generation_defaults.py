"""How a model's makers want it sampled: the numbers of its `generation_config.json`. What is no number is refused, what
changes nothing is left out.

As in vLLM, `do_sample` means nothing here: a request that wants the likeliest token says so with temperature 0.
"""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

from strata.errors import ModelError
from strata.models.config import read_json

FILE = "generation_config.json"

_FIELDS = MappingProxyType(
    {
        "temperature": ("temperature", 1.0),
        "top_p": ("top_p", 1.0),
        "top_k": ("top_k", 0),
        "min_p": ("min_p", 0.0),
        "repetition_penalty": ("repetition_penalty", 1.0),
        "max_new_tokens": ("max_tokens", None),
    }
)
"""By the file's key: the name that requests have for it, and the value that changes nothing."""
_TOO_LARGE = 2**31
_WHOLE = frozenset({"top_k", "max_tokens"})


def generation_defaults(folder: Path) -> dict[str, float]:
    """By the name of a request's field, what the model's folder has for it. Raises ModelError."""
    path = folder / FILE
    given = read_json(path) if path.is_file() else {}
    found = {}
    for key, (name, neutral) in _FIELDS.items():
        value = given.get(key)
        if value is None:
            continue
        whole = name in _WHOLE
        is_number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
        if not is_number or not abs(value) < _TOO_LARGE:
            raise ModelError(
                f"{path}: {key} {value!r} is no {'whole ' if whole else ''}number of any use; repair the file, or "
                "leave it aside with --generation-config none"
            )
        value = max(0, value) if name == "top_k" else value  # -1 is another spelling of all tokens
        if value != neutral:
            found[name] = value
    return found
