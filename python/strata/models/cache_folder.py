"""Where Strata keeps what it can rebuild: converted models and file digests, in the user's cache folder.

A folder or file appears here only when it is complete: it is written beside its place and renamed into it, so
two processes may do the same work at once and either result stands.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def default_cache_folder() -> Path:
    """``STRATA_CACHE_DIR``, else ``strata`` in ``XDG_CACHE_HOME``, else ``~/.cache/strata``."""
    own = os.environ.get("STRATA_CACHE_DIR")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared).expanduser() if shared else Path.home() / ".cache") / "strata"


def build_folder(final: Path, build: Callable[[Path], None]) -> Path:
    """Return ``final``, filled by ``build(empty folder)`` if missing; an error leaves nothing behind."""
    if final.is_dir():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{final.name}.", dir=final.parent) as scratch:
        unfinished = Path(scratch) / "folder"
        unfinished.mkdir()
        build(unfinished)
        for path in unfinished.iterdir():
            _flush_to_disk(path)
        try:
            os.rename(unfinished, final)
        except OSError:
            # Another process was first; its folder is as complete as this one.
            if not final.is_dir():
                raise
    return final


def write_file(path: Path, text: str) -> None:
    """Write a small file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as file:
        file.write(text)
    os.replace(file.name, path)


def _flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
