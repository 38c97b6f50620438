"""`python -m strata.bench.tiny_server [flags]`: the server around a tiny random model that reads and writes token ids.

Its steps take a millisecond or two: what it is asked for shows what the server itself costs.
"""

from __future__ import annotations

import os

# As in `strata.serve`: before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import sys
from collections.abc import Sequence

import torch

from strata.config import StrataConfig
from strata.engine.engine import Engine
from strata.engine.served_model import ServedModel
from strata.models import tiny_random_model
from strata.serve.__main__ import main as serve

MODULE = "strata.bench.tiny_server"


def load_tiny(config: StrataConfig) -> Engine:
    """An engine over a model of three small layers. Its text is empty: it has no tokenizer."""
    torch.set_num_threads(1)
    return Engine(config, ServedModel(tiny_random_model(0, dtype=torch.float32), None, "tiny", "tiny"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the server. Returns the exit code."""
    return serve(arguments, load_tiny, f"python -m {MODULE}")


if __name__ == "__main__":
    sys.exit(main())
