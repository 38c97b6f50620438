"""`python -m strata.bench COMMAND [flags]`: picks the measurement; errors are one sentence and exit code
1.
"""

from __future__ import annotations

import os

# OpenMP reads it when torch is first imported: its idle threads must sleep, not spin, where copy and disk
# threads share their cores. The server does the same.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import importlib
import sys
from collections.abc import Sequence

from strata.errors import StrataError

COMMANDS: dict[str, tuple[str, str]] = {
    "longdoc": (
        "strata.bench.longdoc_command",
        "time to first token of questions over long documents, from every tier",
    ),
    "tree": ("strata.bench.tree", "match and insert of the prefix tree beside memcmp and memcpy"),
    "sched": ("strata.bench.sched", "decisions of the scheduler with many requests waiting"),
    "copy": ("strata.bench.copy_command", "copies between the pools' layouts beside memcpy"),
    "disk": ("strata.bench.disk_command", "reads and writes of the disk tier beside fio"),
    "tiers": (
        "strata.bench.tiers_command",
        "slow disks, documents that do not fit, and decoding, beside the tiers switched off",
    ),
    "serve": (
        "strata.bench.serve_command",
        "any OpenAI-compatible server under load: documents, chats or a trace, at several rates",
    ),
    "policies": (
        "strata.bench.policies_command",
        "the scheduler's policies beside each other under load, then one of them with each of its parts off",
    ),
    "scheduling": (
        "strata.bench.scheduling_command",
        "fifty sharers of a prefix with and without deferral, and a host hit beside decoding streams",
    ),
    "predict": (
        "strata.bench.predict_command",
        "the simulator, fitted to one workload's steps, beside real runs of others",
    ),
    "http-overhead": (
        "strata.bench.http_overhead_command",
        "what the server adds to 1-token answers from the cache of a tiny model, at a fixed rate",
    ),
    "soak-http": (
        "strata.bench.soak_command",
        "many clients of which some leave, for minutes: nothing may be left behind, no request may fail",
    ),
    "models": ("strata.bench.models_command", "memory and speed of models of published shapes"),
    "decode": ("strata.bench.decode_command", "tokens a second of a batch of streams beside transformers"),
}
"""Command -> (module with `main(arguments, program)`, what it measures)."""


def usage(program: str) -> str:
    """What `--help` says."""
    rows = "\n".join(f"  {name:<15}{doc}" for name, (_, doc) in COMMANDS.items())
    return (
        f"usage: {program} COMMAND [flags]\n\ncommands:\n{rows}\n\n"
        f"`{program} COMMAND --help` lists its flags."
    )


def main(arguments: Sequence[str] | None = None, program: str = "python -m strata.bench") -> int:
    """Runs one measurement. Returns the exit code; 2 for an unknown command."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and given[0] in ("-h", "--help"):
        print(usage(program))
        return 0
    if not given or given[0] not in COMMANDS:
        complaint = f"{given[0]!r} is no measurement" if given else "no measurement given"
        print(f"error: {complaint}\n{usage(program)}", file=sys.stderr)
        return 2
    module, _ = COMMANDS[given[0]]
    try:
        # Imported only now: `tree` does not need torch.
        code: int = importlib.import_module(module).main(given[1:], program=f"{program} {given[0]}")
    except StrataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: no result", file=sys.stderr)
        return 130
    return code


if __name__ == "__main__":
    sys.exit(main())
