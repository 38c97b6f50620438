"""`strata COMMAND ...`: hands the rest of the line to the command's own main."""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Sequence

COMMANDS: dict[str, tuple[str, str]] = {
    "serve": ("strata.serve.__main__", "answer requests over HTTP in OpenAI's protocol"),
    "bench": ("strata.bench.__main__", "measure the tiers, the prefix tree and decoding on this machine"),
    "simulate": ("strata.simulate.__main__", "run the scheduler and the cache on a machine that is not here"),
    "inspect": ("strata.cli.inspect_command", "show what lies in a disk root"),
    "purge": ("strata.cli.purge_command", "delete the records in a disk root"),
    "plan": (
        "strata.simulate.plan.command",
        "simulate tiers of many sizes and name the cheapest that is fast enough",
    ),
    "doctor": ("strata.cli.doctor", "look at this machine: what works, what does not, which flags suit it"),
}
"""Command -> (module with `main(arguments, program=...)`, what it does)."""


def usage() -> str:
    """What `strata --help` says."""
    rows = "\n".join(f"  {name:<10}{doc}" for name, (_, doc) in COMMANDS.items())
    return f"usage: strata COMMAND [flags]\n\ncommands:\n{rows}\n\n`strata COMMAND --help` lists its flags."


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. Returns its exit code; 2 for an unknown command."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and given[0] in ("-h", "--help"):
        print(usage())
        return 0
    if not given or given[0] not in COMMANDS:
        print(
            f"error: {f'{given[0]!r} is no command' if given else 'no command given'}\n{usage()}",
            file=sys.stderr,
        )
        return 2
    if arguments is None and given[0] == "serve":
        # Ctrl-C during the imports ends the process, without a traceback; the server takes the signal over.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    module, _ = COMMANDS[given[0]]
    # Imported only now: a command may load torch.
    code: int = importlib.import_module(module).main(given[1:], program=f"strata {given[0]}")
    return code


if __name__ == "__main__":
    sys.exit(main())
