"""Installs what pyproject.toml asks for and the environment lacks; what is there and in range stays.

Runs in the project's virtual environment. torch goes first and alone: it is by far the largest, the only one
with builds to choose from, and the user learns of its size and the remedy before the download starts.
"""

import argparse
import platform
import subprocess
import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# Distributions that the Makefile runs as programs of the environment. One that is only seen there, because it
# belongs to the interpreter whose torch is reused, has its program elsewhere and does not count.
PROGRAMS = {"maturin": "maturin", "ruff": "ruff", "import-linter": "lint-imports"}

CUDA_NOTICE = """\
      torch is not installed yet. For Linux, PyPI serves its CUDA build: 4.7 GB on disk with its libraries.
      Without an NVIDIA GPU, stop here (Ctrl-C) and give make the index of the CPU build:
          TORCH_INDEX_URL=... (the selector on pytorch.org shows the index of the CPU build)
      or an interpreter that has a torch already: `make distclean`, then PYTHON=/path/to/python"""


def wanted(project: dict[str, Any], extras: list[str]) -> list[Requirement]:
    """The requirements of the build, of the package and of `extras` that apply to this interpreter."""
    lines = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    optional = project["project"]["optional-dependencies"]
    for extra in extras:
        if extra not in optional:
            sys.exit(
                f"error: pyproject.toml has no extra {extra!r}; EXTRAS takes {', '.join(sorted(optional))}"
            )
        lines += optional[extra]
    requirements = [Requirement(line) for line in lines]
    return [one for one in requirements if one.marker is None or one.marker.evaluate()]


def is_met(requirement: Requirement) -> bool:
    """Whether the environment holds the distribution in a version of the range; development builds count."""
    program = PROGRAMS.get(requirement.name)
    if program is not None and not (Path(sysconfig.get_path("scripts")) / program).exists():
        return False
    try:
        return requirement.specifier.contains(version(requirement.name), prereleases=True)
    except PackageNotFoundError:
        return False


def install(requirements: list[Requirement], options: list[str]) -> None:
    """Let pip install `requirements`; end the program with the remedy where it fails."""
    command = [sys.executable, "-m", "pip", "install", *options, *map(str, requirements)]
    if subprocess.run(command, check=False).returncode != 0:
        sys.exit(
            f"error: pip could not install {', '.join(map(str, requirements))}; its message is above."
            " Without a network set PIP_INDEX_URL or PIP_FIND_LINKS to a place that has them"
        )


def install_torch(requirement: Requirement, index_url: str) -> None:
    """Install torch from `index_url`, or from pip's own index with a word about what that means."""
    if index_url:
        print(f"      torch comes from {index_url}", flush=True)
        install([requirement], ["--index-url", index_url])
    else:
        if platform.system() == "Linux":
            print(CUDA_NOTICE, flush=True)
        install([requirement], [])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--extras", default="", help="names of extras of pyproject.toml, parted by commas")
    parser.add_argument("--torch-index-url", default="", help="the package index that torch is taken from")
    arguments = parser.parse_args()

    manifest = Path(__file__).resolve().parent.parent / "pyproject.toml"
    project = tomllib.loads(manifest.read_text(encoding="utf-8"))
    extras = [extra for extra in arguments.extras.split(",") if extra]
    missing = [one for one in wanted(project, extras) if not is_met(one)]
    if not missing:
        print("      all there", flush=True)
    for requirement in missing:
        if requirement.name == "torch":
            install_torch(requirement, arguments.torch_index_url)
    rest = [one for one in missing if one.name != "torch"]
    if rest:
        print(f"      installing {', '.join(one.name for one in rest)}", flush=True)
    programs = [one for one in rest if one.name in PROGRAMS]
    if programs:
        install(programs, ["--quiet", "--ignore-installed"])
    libraries = [one for one in rest if one.name not in PROGRAMS]
    if libraries:
        install(libraries, ["--quiet"])


if __name__ == "__main__":
    main()
