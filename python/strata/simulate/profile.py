"""This machine as the simulator's hardware, fitted to what a server logged of its own steps.

`python -m strata.simulate.profile --log steps.jsonl --model FOLDER --output machine.json` writes a table of constants
to which the machine (`--name`) and the server (`served`, as model and as system) are added, for `--constants`. How far
the fit is off is told.

A step takes `step_overhead_s + row_overhead_s * rows + FLOPs / peak + bytes read / bandwidth + context / gather`, where
FLOPs and bytes are the simulator's own of that model: what each costs is the fit's, what a step has of each is not.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from strata import _core
from strata.errors import ConfigError, StrataError
from strata.simulate import constants
from strata.simulate.doctor import hardware_of
from strata.simulate.fit import Array, Residuals, fit_times
from strata.simulate.served import COPY, SERVED, as_served, server_overrides
from strata.simulate.step_log import StepLog, Transfers, read_step_log

LEAST_STEPS = 20
"""Fewer say nothing about how steps differ."""
_GAP_S = 0.005
"""A longer gap between two steps is time in which there was nothing to do."""
_NEVER = 1e300
"""A speed at which a step takes no time."""


@dataclass(frozen=True)
class Profile:
    """`hardware` is an entry of the table of constants, `model` a config.json with the dtypes that ran, `residuals`
    tell prefill and decode steps apart."""

    hardware: dict[str, Any]
    model: dict[str, Any]
    residuals: dict[str, Residuals]


def fit_profile(
    log: StepLog, model: Mapping[str, Any], doctor: Mapping[str, Any] | None = None, name: str = "cpu"
) -> Profile:
    """The machine that wrote the log. `model` is the served model's config.json, `doctor` what `strata doctor
    --json` printed; without it nothing is known of the disk. Raises ConfigError if the log is of another model, or too
    short."""
    served = as_served(model, log.header)
    if len(log) < LEAST_STEPS:
        raise ConfigError(
            f"--log has {len(log)} steps, and a fit needs {LEAST_STEPS}; let the server answer some more requests"
        )
    terms = step_terms(served, log)
    measured = log.columns["busy_s"] + log.columns["rest_s"]
    costs = fit_times(terms, measured)
    predicted = terms @ costs
    residuals = {
        kind: Residuals.of(predicted[of], measured[of])
        for kind, of in (("prefill", ~log.decode), ("decode", log.decode))
        if of.any()
    }
    entry = _entry(name, log, served, costs, doctor)
    return Profile(entry, served, residuals)


def step_terms(model: Mapping[str, Any], log: StepLog) -> Array:
    """[steps, 5] of each step: FLOPs, bytes read, rows, bytes of context in prefill and in decode. Each is what the
    simulator says that the step takes where nothing else takes time."""
    terms = []
    for fields in (
        {"peak_flops": 1.0},
        {"memory_bandwidth": 1.0},
        {"row_overhead_s": 1.0},
        {"prefill_gather_bandwidth": 1.0},
        {"decode_gather_bandwidth": 1.0},
    ):
        hardware = json.dumps({**_timeless(), **fields})
        terms.append(
            np.where(
                log.decode,
                _linear(hardware, model, log, decode=True),
                _linear(hardware, model, log, decode=False),
            )
        )
    return np.stack(terms, axis=1)


def _timeless() -> dict[str, Any]:
    """A machine on which a step takes no time."""
    return {
        "name": "timeless",
        "peak_flops": _NEVER,
        "memory_bandwidth": _NEVER,
        "prefill_efficiency": 1.0,
        "decode_efficiency": 1.0,
        "step_overhead_s": 0.0,
        "overlaps_reads": False,
        "device_bytes": 0.0,
        "device_share": 1.0,
        "host_bytes": 0.0,
        "copies": {},
    }


def _linear(hardware: str, model: Mapping[str, Any], log: StepLog, decode: bool) -> Array:
    """Seconds [steps] out of the sums that the log has of each step. Without experts a step's time is linear in them,
    so that five steps tell what each adds."""
    config = json.dumps(model)

    def seconds(*rows: tuple[int, int, bool]) -> float:
        return _core.step_seconds(hardware, config, list(rows), decode)

    one = seconds((1, 0, False))
    row = seconds((1, 0, False), (0, 0, False)) - one
    # A second token of a row attends to the first: three pairs instead of one. A context token adds a pair of its own.
    two, after = seconds((2, 0, False)), seconds((1, 1, False))
    head = seconds((1, 0, True)), seconds((1, 0, True), (1, 0, True))
    idle = seconds((0, 1, False)) - seconds((0, 0, False))
    pair = (after - one) - idle
    token = two - one - 2 * pair
    sample = head[1] - head[0] - (token + pair + row)
    head_once = head[0] - one - sample
    base = one - row - token - pair
    columns = log.columns
    return (
        base
        + row * columns["rows"]
        + token * columns["tokens"]
        + pair * columns["pairs"]
        + idle * columns["context"]
        + sample * columns["sampled"]
        + head_once * (columns["sampled"] > 0)
    )


def _overhead(log: StepLog) -> float:
    """Seconds between steps that follow one another."""
    columns = log.columns
    ends = columns["at_s"] + columns["busy_s"] + columns["stalled_s"] + columns["rest_s"]
    gaps = columns["at_s"][1:] - ends[:-1]
    gaps = gaps[(gaps >= 0) & (gaps < _GAP_S)]
    return float(np.median(gaps)) if len(gaps) else 0.0


def _entry(
    name: str,
    log: StepLog,
    model: Mapping[str, Any],
    costs: Array,
    doctor: Mapping[str, Any] | None,
) -> dict[str, Any]:
    source = f"fitted to {len(log)} steps of a server's own log"

    def fitted(value: float, unit: str) -> dict[str, Any]:
        return {"value": value, "unit": unit, "source": source}

    flops, reads, row, prefill_context, decode_context = (float(cost) for cost in costs)
    if len(np.unique(log.columns["tokens"])) < 2:
        raise ConfigError(
            "--log has no steps that differ in tokens, which would tell the cost of arithmetic from that of reading "
            "weights; log a run with prompts of several lengths and answers of several tokens"
        )

    def rate(cost: float) -> float:
        # In a short log of a busy machine one of the two may hide all of the other.
        return 1.0 / cost if cost else _NEVER

    found = hardware_of(doctor) if doctor is not None else {}
    entry = {
        "name": name,
        "peak_flops": fitted(rate(flops), "FLOP/s that steps reach"),
        "memory_bandwidth": fitted(rate(reads), "bytes/s that steps reach"),
        "prefill_efficiency": 1.0,
        "decode_efficiency": 1.0,
        "step_overhead_s": fitted(_overhead(log), "s between steps"),
        "overlaps_reads": False,
        "row_overhead_s": fitted(row, "s"),
        "prefill_gather_bandwidth": fitted(
            1.0 / prefill_context if prefill_context else 0.0, "bytes/s; 0: no time"
        ),
        "decode_gather_bandwidth": fitted(
            1.0 / decode_context if decode_context else 0.0, "bytes/s; 0: no time"
        ),
        "device_share": 1.0,
        **found,
        "copies": {COPY: _copy(log, int(model["num_hidden_layers"]), found, source)},
    }
    pages = log.header["pages"]
    if pages["disk"] and "disk" not in found:
        raise ConfigError(
            "--log is of a server with a disk tier, and how fast the disk is, is not known: give --doctor, the output "
            "of `strata doctor --json` (which could measure it), or log a server with --disk-capacity 0"
        )
    # What the server had, not what the machine has: sizes are flags, not facts.
    page_bytes = float(log.header["page_bytes"])
    weights = _weights_bytes(model)
    entry["device_bytes"] = fitted(weights + pages["device"] * page_bytes, "bytes of weights and pages")
    entry["host_bytes"] = fitted(pages["host"] * page_bytes, "bytes of pages")
    if pages["disk"]:
        entry["disk"] = {**entry["disk"], "bytes": fitted(pages["disk"] * page_bytes, "bytes of pages")}
    return entry


def _weights_bytes(model: Mapping[str, Any]) -> float:
    """What a step reads that samples, beside its own KV."""
    hardware = json.dumps({**_timeless(), "memory_bandwidth": 1.0})
    return _core.step_seconds(hardware, json.dumps(model), [(0, 0, True)], True)


def _copy(log: StepLog, layers: int, found: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The link's way of copying: measured where the log has transfers, the doctor's rate where it has none."""
    costs = {kind: _transfer_costs(log.transfers.get(kind)) for kind in ("load", "backup")}
    known = [cost for cost in costs.values() if cost is not None]
    if not known:
        if "copies" not in found:
            raise ConfigError(
                "--log has no transfer and --doctor is missing: nothing says how fast the host copies"
            )
        return dict(found["copies"][COPY])
    load, backup = costs["load"] or known[0], costs["backup"] or known[0]
    cell = {"unit": "bytes/s", "source": source}
    return {
        "operation": "layer",
        "per_operation_s": {"value": load[0] / layers, "unit": "s", "source": source},
        "to_device": {"value": 1.0 / load[1], **cell},
        "to_host": {"value": 1.0 / backup[1], **cell},
        "prefill_share": 0.0,
        "decode_share": 0.0,
    }


def _transfer_costs(moved: Transfers | None) -> tuple[float, float] | None:
    """Seconds a transfer and seconds a byte; None where nothing was moved."""
    if moved is None or not len(moved.bytes) or not moved.bytes.sum() or not moved.seconds.sum():
        return None
    some = moved.seconds > 0
    per_transfer, per_byte = fit_times(
        np.stack([moved.completed[some], moved.bytes[some]], axis=1), moved.seconds[some]
    )
    if not per_byte:
        return 0.0, float(moved.seconds.sum() / moved.bytes.sum())
    return float(per_transfer), float(per_byte)


def table_with(profile: Profile, log: StepLog) -> dict[str, Any]:
    """Strata's table of constants, to which the machine is added, and model and settings of the server as `served`."""
    table = constants.table()
    name = str(profile.hardware["name"])
    system = {"extends": "ours", **server_overrides(log)["system"], "notes": ["as the logged server was set"]}
    return {
        **table,
        "hardware": {**table["hardware"], name: profile.hardware},
        "models": {**table["models"], SERVED: {"config": profile.model}},
        "systems": {**table["systems"], SERVED: system},
    }


def read_model(path: Path) -> dict[str, Any]:
    """A config.json, or that of a folder. Raises ConfigError."""
    file = path.expanduser() / "config.json" if path.expanduser().is_dir() else path.expanduser()
    return _read_json(file, "--model", "a Hugging Face folder or its config.json")


def _read_json(path: Path, flag: str, wanted: str) -> dict[str, Any]:
    try:
        found = json.loads(path.expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{flag} {path} cannot be read: {error}; give {wanted}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{flag} {path} holds no object; give {wanted}")
    return found


def _told(profile: Profile) -> str:
    lines = [
        f"{kind}: {of.count} steps, relative error {of.median:.1%} (median), {of.p90:.1%} (P90), predicted time "
        f"{of.total_ratio:.3f} of measured"
        for kind, of in profile.residuals.items()
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None, program: str = "python -m strata.simulate.profile") -> int:
    """Reads, fits, writes and tells. Returns 0, or 1 with a sentence."""
    parser = argparse.ArgumentParser(prog=program, allow_abbrev=False, description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--log", type=Path, required=True, metavar="FILE", help="what --step-log of a server wrote"
    )
    parser.add_argument(
        "--model", type=Path, required=True, metavar="M", help="the served model's folder or config.json"
    )
    parser.add_argument("--doctor", type=Path, metavar="FILE", help="what `strata doctor --json` printed")
    parser.add_argument(
        "--name", default="cpu", help="the machine's name in the table (default: %(default)s)"
    )
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FILE", help="where the table is written"
    )
    options = parser.parse_args(arguments)
    try:
        doctor = None
        if options.doctor is not None:
            doctor = _read_json(options.doctor, "--doctor", "the output of `strata doctor --json`")
        log = read_step_log(options.log)
        profile = fit_profile(log, read_model(options.model), doctor, options.name)
        _write(options.output, profile, log)
    except StrataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(_told(profile))
    return 0


def _write(path: Path, profile: Profile, log: StepLog) -> None:
    residuals = {kind: asdict(of) for kind, of in profile.residuals.items()}
    whole = {**table_with(profile, log), "profile": {"residuals": residuals, "server": server_overrides(log)}}
    try:
        path.expanduser().write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {path} cannot be written: {error}; name another file") from error


if __name__ == "__main__":
    sys.exit(main())
