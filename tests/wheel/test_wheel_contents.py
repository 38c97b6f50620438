"""The wheel and the source distribution of `make wheel`: what is in them, what they claim, what must not be in them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from bare_environment import ROOT, built_wheel
from packaging.utils import parse_wheel_filename

import strata
from strata.device.cubins import ARCHITECTURES, MANIFEST, cubin_path
from strata.device.kernel_source import ENTRY, bundle, digest

pytestmark = pytest.mark.wheel

PLATFORM = "manylinux_2_28_x86_64"
"""That of torch's own wheels: who can install torch can install Strata."""
EXTENSION = "strata/_core.abi3.so"
CUBINS = "strata/device/cubins/"


@pytest.fixture(scope="module")
def wheel() -> dict[str, bytes]:
    """The wheel's files by name."""
    with zipfile.ZipFile(built_wheel()) as files:
        return {name: files.read(name) for name in files.namelist()}


@pytest.fixture(scope="module")
def source() -> dict[str, bytes]:
    """The source distribution's files by name, without its folder."""
    (path,) = (ROOT / "dist").glob("strata_kv-*.tar.gz")
    with tarfile.open(path) as files:
        members = {member.name.partition("/")[2]: files.extractfile(member) for member in files}
        return {name: content.read() for name, content in members.items() if content is not None}


def tree(folder: str) -> dict[str, bytes]:
    """The sources below `folder` of the checkout, by their path in it; no build products."""
    products = ("__pycache__", "cubins")
    return {
        str(path.relative_to(ROOT)): path.read_bytes()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix != ".so" and not set(products) & set(path.parts)
    }


def audited(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *command, str(built_wheel())],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_tag_is_of_every_python_from_3_10_on_an_old_linux(wheel: dict[str, bytes]) -> None:
    name, version, _, tags = parse_wheel_filename(built_wheel().name)
    assert (name, str(version)) == ("strata-kv", strata.__version__)
    assert [str(tag) for tag in tags] == [f"cp310-abi3-{PLATFORM}"]
    (metadata,) = (content.decode() for file, content in wheel.items() if file.endswith("/METADATA"))
    assert "\nRequires-Python: >=3.10\n" in metadata


def test_the_extension_asks_for_no_newer_c_library_than_the_tag_says() -> None:
    words = " ".join(audited("auditwheel", "show").split())
    assert f'is consistent with the following platform tag: "{PLATFORM}"' in words


def test_the_extension_uses_only_the_stable_interface_of_python_3_10() -> None:
    (report,) = json.loads(audited("abi3audit", "--strict", "--report"))["specs"].values()
    (extension,) = report["wheel"]
    assert extension["name"] == Path(EXTENSION).name
    assert extension["result"]["is_abi3"]
    assert extension["result"]["baseline"] == "3.10"
    assert not extension["result"]["non_abi3_symbols"] and not extension["result"]["future_abi3_objects"]


def test_the_wheel_holds_the_package_and_nothing_else(wheel: dict[str, bytes]) -> None:
    sources = {name.removeprefix("python/"): content for name, content in tree("python/strata").items()}
    packaged = {
        name: content
        for name, content in wheel.items()
        if ".dist-info/" not in name and not name.startswith(CUBINS) and name != EXTENSION
    }
    assert packaged.keys() == sources.keys()
    assert [name for name, content in sources.items() if packaged[name] != content] == []
    for read in ("strata/py.typed", "strata/_core.pyi", "strata/serve/page/index.html", EXTENSION):
        assert read in wheel


def test_the_wheel_holds_the_gpu_kernels_and_their_source(wheel: dict[str, bytes]) -> None:
    held = {name.removeprefix(CUBINS): content for name, content in wheel.items() if name.startswith(CUBINS)}
    cubins = {cubin_path(architecture, Path()).name for architecture in ARCHITECTURES}
    assert held.keys() == {ENTRY, MANIFEST, *cubins}
    assert held[ENTRY].decode() == bundle()
    assert json.loads(held[MANIFEST])["source"] == digest(bundle())


def test_no_file_names_a_folder_of_this_machine(wheel: dict[str, bytes], source: dict[str, bytes]) -> None:
    cargo = os.environ.get("CARGO_HOME", str(Path.home() / ".cargo"))
    folders = {str(Path.home()), str(ROOT), sys.prefix, sys.base_prefix, cargo}
    marks = [f"{folder.rstrip('/')}/".encode() for folder in folders if len(Path(folder).parts) > 1]
    for files in (wheel, source):
        named = [(name, mark) for name, content in files.items() for mark in marks if mark in content]
        assert named == []


def test_the_source_distribution_holds_all_that_a_build_needs(source: dict[str, bytes]) -> None:
    needed = {**tree("python/strata"), **tree("rust"), **tree("cuda")}
    for name in ("Cargo.toml", "Cargo.lock", "pyproject.toml", "README.md", "LICENSE"):
        needed[name] = (ROOT / name).read_bytes()
    assert [name for name, content in sorted(needed.items()) if source.get(name) != content] == []


def test_the_source_distribution_builds_with_the_locked_crates(
    source: dict[str, bytes], tmp_path: Path
) -> None:
    for name, content in source.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    command = ["cargo", "metadata", "--locked", "--format-version", "1", "--no-deps"]
    told = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert told.returncode == 0, told.stderr
    assert {package["name"] for package in json.loads(told.stdout)["packages"]} >= {
        "strata-py",
        "strata-core",
    }
