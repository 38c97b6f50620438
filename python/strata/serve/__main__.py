"""`python -m strata.serve`: reads the settings, serves, and turns errors into one sentence and exit code
1."""

from __future__ import annotations

import os
import signal

if __name__ == "__main__":
    # Ctrl-C while the imports below take their second ends the process, without a traceback; `StopSignals` takes over
    # from here. Not for those who import this module: the signal is theirs.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

# OpenMP reads it when torch is first imported: its idle threads must sleep, not spin, where copy and disk
# threads share their cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import importlib
import sys
from collections.abc import Sequence

from strata.config import StrataConfig, read_config
from strata.engine.api import EngineProtocol
from strata.errors import StrataError
from strata.serve.lifecycle import LoadEngine, run_server


def load_engine(config: StrataConfig) -> EngineProtocol:
    """The real engine. Imported here, since `--help` and a refused port must not wait for torch."""
    engine: EngineProtocol = importlib.import_module("strata.engine").Engine(config)
    return engine


def main(
    arguments: Sequence[str] | None = None,
    load: LoadEngine = load_engine,
    program: str = "python -m strata.serve",
) -> int:
    """Runs the server. Returns the exit code."""
    try:
        given = sys.argv[1:] if arguments is None else arguments
        config = read_config(given, program=program, takes_model=True)
        return run_server(config, load)
    except StrataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
