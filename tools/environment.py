"""Makes the virtual environment that the Makefile works in, or says what the machine lacks.

Runs in the interpreter that the user points to (`make PYTHON=...`) with its standard library alone, and loads
in old interpreters too, so that they can be told apart. Everything is checked before anything is written. An
environment that already exists is kept. A torch that this interpreter imports is reused, not downloaded.
"""

import argparse
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

try:
    from importlib import metadata
except ImportError:  # before Python 3.8, which `python_problems` turns away
    metadata = None

ROOT = Path(__file__).resolve().parent.parent
MINIMUM_PYTHON = (3, 10)
OUTER_PACKAGES = "zz_outer_packages.pth"  # read last: what the environment itself holds comes first


def python_problems():
    """What keeps this interpreter from carrying the environment: a list of sentences with remedies."""
    found = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if sys.version_info[:2] < MINIMUM_PYTHON:
        newer = [f"python3.{minor}" for minor in range(20, 9, -1) if shutil.which(f"python3.{minor}")]
        remedy = f"run make again with PYTHON={newer[0]}" if newer else "install one, name it with PYTHON=..."
        return [f"{sys.executable} is Python {found}; Strata needs Python 3.10 or newer: {remedy}"]
    if importlib.util.find_spec("ensurepip") is None or importlib.util.find_spec("venv") is None:
        return [
            f"{sys.executable} cannot make a virtual environment, its ensurepip is missing: on Debian and"
            f" Ubuntu run `apt install python{found}-venv`, or name another interpreter with PYTHON=..."
        ]
    return []


def rust_problems():
    """What keeps this machine from building the workspace: a list of sentences with remedies."""
    manifest = (ROOT / "Cargo.toml").read_text(encoding="utf-8")
    wanted = re.search(r'^rust-version = "([\d.]+)"', manifest, re.MULTILINE).group(1)
    need = (
        f"Strata needs Rust {wanted} or newer: install it from https://rustup.rs, or `rustup update stable`"
    )
    missing = [tool for tool in ("cargo", "rustc") if shutil.which(tool) is None]
    if missing:
        return [f"{' and '.join(missing)} not found on PATH; {need}"]
    reported = subprocess.run(["rustc", "--version"], stdout=subprocess.PIPE, check=False).stdout.decode()
    found = re.search(r"rustc (\d+)\.(\d+)", reported)
    if found is None:
        return [f"`rustc --version` does not work; {need}"]
    problems = []
    if tuple(map(int, found.groups())) < tuple(map(int, wanted.split(".")[:2])):
        problems.append(f"rustc is {'.'.join(found.groups())}; {need}")
    if shutil.which("cc") is None:
        problems.append("no C compiler `cc`, which Rust links with: on Debian and Ubuntu `apt install gcc`")
    return problems


def find_torch():
    """Folder of the torch that this interpreter imports and pyproject.toml accepts, or None."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    wanted = re.search(r'"torch>=(\d+)\.(\d+)', project).groups()
    version = metadata.version("torch")
    if tuple(map(int, version.split(".")[:2])) < tuple(map(int, wanted)):
        print(f"      torch {version} of {sys.executable} is too old and is left alone", flush=True)
        return None
    print(f"      reusing torch {version} of {sys.executable}", flush=True)
    return Path(spec.origin).parent.parent


def run(command, remedy):
    """Run `command`; end the program with the remedy where it fails."""
    if subprocess.run(command, check=False).returncode != 0:
        sys.exit(f"error: `{' '.join(command)}` failed, its message is above; {remedy}")


def create(folder):
    """Make the environment in `folder`; it sees the packages of this interpreter if they hold a torch."""
    torch_folder = find_torch()
    options = ["--clear", *(["--system-site-packages"] if torch_folder else [])]
    run([sys.executable, "-m", "venv", *options, str(folder)], f"remove {folder} and run make again")
    if torch_folder and sys.prefix != sys.base_prefix:
        # This interpreter is of a virtual environment itself, so its packages are no system packages.
        site_packages = next(folder.glob("lib/python*/site-packages"))
        (site_packages / OUTER_PACKAGES).write_text(f"{torch_folder}\n", encoding="utf-8")


def works(python):
    """Whether `python` is an interpreter of a supported version that has pip."""
    if not python.exists():
        return False
    check = f"import sys, pip; sys.exit(sys.version_info[:2] < {MINIMUM_PYTHON})"
    return subprocess.run([str(python), "-c", check], stderr=subprocess.DEVNULL, check=False).returncode == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="the virtual environment")
    folder = parser.parse_args().folder
    problems = python_problems() + rust_problems()
    if problems:
        sys.exit("\n".join(f"error: {problem}" for problem in problems))
    python = folder / "bin" / "python"
    if works(python):
        print(f"      using {folder} as it is", flush=True)
    else:
        create(folder)
    # tools/dependencies.py reads pyproject.toml with these.
    readers = ["packaging", 'tomli; python_version < "3.11"']
    remedy = "without a network set PIP_INDEX_URL or PIP_FIND_LINKS to a place that has them"
    run([str(python), "-m", "pip", "install", "--quiet", *readers], remedy)


if __name__ == "__main__":
    main()
