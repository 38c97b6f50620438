"""Workloads from files, and what can be said of one without running it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from strata.errors import ConfigError
from strata.simulate.convert import CharacterEstimate, Conversion, convert

_KINDS = ("documents", "conversations", "trace", "tool_agents", "explicit")
_WANTED = (
    "give what `python -m strata.simulate.convert` wrote, a `workloads` entry of the table of constants, or a trace in "
    "Mooncake's form"
)
# For people, not for the simulator.
_PROSE = ("notes", "statistics")


def workload_file(path: Path, flag: str = "--workload") -> dict[str, Any]:
    """The workload in a file: a converter's output, an entry of the table of constants, or Mooncake's JSON lines.

    Values stand without units and sources. Raises ConfigError that names `flag`, the file and what is wrong.
    """
    if not path.is_file():
        raise ConfigError(f"{flag} {path} does not exist; {_WANTED}")
    if path.suffix.lower() == ".jsonl":
        return _trace(path)
    try:
        entry = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{flag} {path} cannot be read as JSON: {error}; {_WANTED}") from error
    if not isinstance(entry, dict) or entry.get("kind") not in _KINDS:
        kind = entry.get("kind") if isinstance(entry, dict) else None
        raise ConfigError(f"{flag} {path}: `kind` is {kind!r}, none of {', '.join(_KINDS)}; {_WANTED}")
    workload = _without_prose(entry)
    if workload["kind"] == "trace" and workload.get("path"):
        # Beside the entry, not beside whoever reads it.
        recorded = _trace(path.parent / workload.pop("path"))["records"]
        workload["records"] = [*recorded, *workload.get("records", [])]
    return workload


def _trace(path: Path) -> dict[str, Any]:
    return _without_prose(convert("mooncake", [path], Conversion(CharacterEstimate())))


def _without_prose(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {name: plain(value) for name, value in entry.items() if name not in _PROSE}


def plain(value: Any) -> Any:
    """A value without the units and sources beside its parts."""
    if isinstance(value, Mapping):
        if "value" in value and "source" in value:
            return plain(value["value"])
        return {name: plain(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [plain(inner) for inner in value]
    return value


def faster(workload: Mapping[str, Any], times: float) -> dict[str, Any]:
    """The workload with arrivals `times` as dense; what readers take to think stays. Raises ConfigError."""
    if not 0 < times < float("inf"):
        raise ConfigError(f"--rate-scale {times:g} is not more than 0; 2 makes requests come twice as fast")
    changed = dict(workload)
    if workload["kind"] == "trace":
        changed["time_scale"] = workload.get("time_scale", 1.0) / times
    elif workload["kind"] == "tool_agents":
        changed["agents_per_second"] = workload["agents_per_second"] * times
    elif workload.get("rate") is not None:
        changed["rate"] = workload["rate"] * times
    elif workload["kind"] == "explicit":
        changed["requests"] = [
            {**request, "arrival_s": request["arrival_s"] / times} for request in workload["requests"]
        ]
    return changed


def first_requests(workload: Mapping[str, Any], most: int) -> dict[str, Any]:
    """The workload's first `most` requests. Raises ConfigError where they are not listed."""
    if most < 1:
        raise ConfigError(f"--requests {most} is less than 1; give 1 or more, or leave it out for all")
    if workload["kind"] == "trace":
        return {**workload, "most_requests": most}
    if workload["kind"] == "explicit":
        return {**workload, "requests": workload["requests"][:most]}
    raise ConfigError(
        f"--requests {most}: a workload of kind {workload['kind']} is drawn, not listed; change its counts in the file"
    )


def distinct_tokens(workload: Mapping[str, Any]) -> int:
    """Tokens of everything that prompts and answers are made of, equal ones once: what a tier that forgets nothing
    holds, at most. Drawn workloads: by their laws' means."""
    kind = workload["kind"]
    if kind == "trace":
        return _tokens_of_trace(workload)
    if kind == "explicit":
        return _tokens_of_requests(workload["requests"])
    return round(_tokens_by_laws(workload))


def _tokens_by_laws(workload: Mapping[str, Any]) -> float:
    def mean(name: str) -> float:
        law = workload.get(name)
        return float(law["mean"]) if law else 0.0

    def number(name: str) -> float:
        return float(workload[name])

    kind = workload["kind"]
    if kind == "documents":
        said = number("queries") * (mean("question_tokens") + mean("output_tokens"))
        return number("contexts") * mean("context_tokens") + said
    if kind == "conversations":
        said = number("rounds") * (mean("question_tokens") + mean("output_tokens"))
        return number("sessions") * mean("opening_tokens") + said
    # A step adds a call, and its result.
    said = number("requests") * (2 * mean("step_tokens") + mean("output_tokens"))
    agents = number("requests") / max(1.0, mean("steps"))
    return number("kinds") * mean("system_tokens") + agents * mean("task_tokens") + said


def _tokens_of_trace(workload: Mapping[str, Any]) -> int:
    block_tokens = workload.get("block_tokens", 512)
    records = workload.get("records", [])[: workload.get("most_requests") or None]
    lengths: dict[int, int] = {}
    answers = 0
    for record in records:
        left = record["input_length"]
        for block in record["hash_ids"]:
            lengths[block] = max(lengths.get(block, 0), min(left, block_tokens))
            left -= lengths[block]
        answers += record["output_length"] + max(0, left)
    return sum(lengths.values()) + answers


def _tokens_of_requests(requests: list[dict[str, Any]]) -> int:
    lengths: dict[int, int] = {}
    for request in requests:
        for segment in [*request["prompt"], {"id": request["answer"], "tokens": request["output"]}]:
            lengths[segment["id"]] = max(lengths.get(segment["id"], 0), segment["tokens"])
    return sum(lengths.values())
