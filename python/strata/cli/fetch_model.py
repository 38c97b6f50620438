"""``python -m strata.cli.fetch_model``: make a model ready to serve and print its folder."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from strata.errors import StrataError
from strata.models import DEFAULT_MODEL, resolve_model


def main(arguments: list[str] | None = None) -> int:
    """Resolve ``--model`` (download and convert where needed); 0 on success, 1 with a message on an error."""
    parser = argparse.ArgumentParser(
        prog="strata.cli.fetch_model", description="Make a model ready to serve."
    )
    parser.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        help="`default`, a Hugging Face folder, a .gguf file or a name on the hub",
    )
    parser.add_argument("--cache-dir", type=Path, default=None, help="default: the user's cache folder")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        folder = resolve_model(options.model, options.cache_dir)
    except StrataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
