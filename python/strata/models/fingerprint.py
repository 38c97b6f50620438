"""The digest that tells two models apart: BLAKE2b over the names and contents of config and weight files.

Reading gigabytes at each start would be slow, so a file's digest is remembered with its path, size and time
of change.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from strata.models.cache_folder import default_cache_folder, write_file
from strata.models.weights import weight_files

DIGEST_BYTES = 32
READ_BYTES = 1 << 20


def model_files(folder: Path) -> list[Path]:
    """The files that determine a model's K/V: its config and its weights."""
    return [folder / "config.json", *weight_files(folder)]


def fingerprint_files(folder: Path, cache_dir: Path | None = None) -> str:
    """Hex digest of a model folder's config and weights, equal wherever the folder lies."""
    return digest_files(model_files(folder), cache_dir)


def digest_files(files: Sequence[Path], cache_dir: Path | None = None) -> str:
    """Hex digest over the names and contents of ``files``; unchanged files are not read again."""
    remembered = (cache_dir or default_cache_folder()) / "digests"
    total = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for path in files:
        for field in (path.name.encode(), bytes.fromhex(_digest_file(path.resolve(), remembered))):
            total.update(len(field).to_bytes(8, "little"))
            total.update(field)
    return total.hexdigest()


def _digest_file(path: Path, remembered: Path) -> str:
    status = path.stat()
    key = {"path": str(path), "size": status.st_size, "mtime_ns": status.st_mtime_ns}
    note = remembered / f"{hashlib.blake2b(str(path).encode(), digest_size=16).hexdigest()}.json"
    known = _read_note(note)
    if known is not None and all(known.get(name) == value for name, value in key.items()):
        return str(known["digest"])
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    with path.open("rb") as file:
        while block := file.read(READ_BYTES):
            digest.update(block)
    write_file(note, json.dumps({**key, "digest": digest.hexdigest()}))
    return digest.hexdigest()


def _read_note(note: Path) -> dict[str, object] | None:
    """A remembered digest, or None if there is none or it is damaged: then the file is simply read again."""
    try:
        value = json.loads(note.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return value if isinstance(value, dict) and isinstance(value.get("digest"), str) else None
