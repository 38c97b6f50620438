"""A virtual environment as `pip install` of the wheel leaves it, with nothing downloaded a second time.

It sees the packages that the wheel's metadata asks for, and those that these ask for, as links into this environment,
and none else that is here: an import that is not declared fails there. Strata itself comes from the wheel alone.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from email.parser import BytesParser
from importlib.metadata import Distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
READY_S = 120.0


def built_wheel() -> Path:
    """The one wheel in dist/."""
    found = sorted((ROOT / "dist").glob("strata_kv-*.whl"))
    assert len(found) == 1, (
        f"dist/ must hold one wheel and holds {[path.name for path in found]}: run `make wheel`"
    )
    return found[0]


class BareEnvironment:
    """Made in `folder`. Its programs run there, with no setting of the tests' and none of the user's caches."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        self.prefix = folder / "environment"
        self.home = folder / "home"
        self.home.mkdir(parents=True)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", self.prefix], check=True, timeout=60)
        (site_packages,) = self.prefix.glob("lib/python*/site-packages")
        for needed in closure(requirements_of(wheel)):
            link(needed, site_packages)
        # No index: pip must find all that the wheel asks for in the environment, each in its range.
        self.pip("install", "--no-index", "--no-cache-dir", str(wheel))

    def pip(self, *arguments: str) -> str:
        """What pip of this interpreter says about the environment. Fails the test where pip does."""
        return self.run(sys.executable, "-m", "pip", "--python", str(self.prefix / "bin/python"), *arguments)

    def python(self, *arguments: str) -> str:
        """What Python prints that looks for modules in the environment alone."""
        return self.run(str(self.prefix / "bin/python"), "-I", *arguments)

    def program(self, name: str, *arguments: str) -> str:
        """What a program prints that the wheel installed."""
        return self.run(str(self.prefix / "bin" / name), *arguments)

    def run(self, *command: str) -> str:
        """Standard output; fails the test with everything that was printed if the exit code is not 0."""
        done = subprocess.run(
            command,
            cwd=self.home,
            env=self._variables(),
            capture_output=True,
            text=True,
            check=False,
            timeout=200,
        )
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    @contextmanager
    def server(self, *flags: str) -> Iterator[str]:
        """`python -m strata.serve` with `flags`, from ready to ended by SIGTERM with exit code 0; its address."""
        log = self.home / "server.log"
        command = [str(self.prefix / "bin/python"), "-I", "-m", "strata.serve", "--port", "0", *flags]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, cwd=self.home, env=self._variables(), stdout=output, stderr=subprocess.STDOUT
            )
        try:
            deadline = time.monotonic() + READY_S
            while not (ready := re.search(r"serving +(\S+)", log.read_text(encoding="utf-8"))):
                assert process.poll() is None and time.monotonic() < deadline, log.read_text(encoding="utf-8")
                time.sleep(0.05)
            yield ready[1]
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, log.read_text(encoding="utf-8")
        finally:
            process.kill()
            process.wait(30)

    def _variables(self) -> dict[str, str]:
        ours = ("PYTHON", "STRATA_", "VIRTUAL_ENV", "XDG_", "PIP_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        return {**kept, "HOME": str(self.home)}


def requirements_of(wheel: Path) -> list[Requirement]:
    """What the wheel's metadata asks for, its extras left out."""
    with zipfile.ZipFile(wheel) as files:
        (name,) = (name for name in files.namelist() if name.endswith(".dist-info/METADATA"))
        lines = BytesParser().parsebytes(files.read(name)).get_all("Requires-Dist", [])
    return _applying([Requirement(line) for line in lines], "")


def closure(requirements: list[Requirement]) -> list[Distribution]:
    """The distributions of this environment that `requirements` and all that they ask for name. What is not here is
    left out: that is pip's to say."""
    found: dict[str, Distribution] = {}
    todo = list(requirements)
    seen: set[tuple[str, str]] = set()
    while todo:
        wanted = todo.pop()
        name = canonicalize_name(wanted.name)
        there = found.get(name) or _installed(wanted)
        if there is None:
            continue
        found[name] = there
        asked = [Requirement(line) for line in there.requires or []]
        for extra in {"", *wanted.extras} - {extra for known, extra in seen if known == name}:
            seen.add((name, extra))
            todo += _applying(asked, extra)
    return list(found.values())


def link(installed: Distribution, folder: Path) -> None:
    """Links the packages, modules and metadata of `installed` into `folder`. Its programs stay where they are."""
    for name in {file.parts[0] for file in installed.files or []} - {"..", "__pycache__"}:
        # Several distributions share a folder such as `nvidia`.
        if not (folder / name).exists():
            (folder / name).symlink_to(Path(str(installed.locate_file(name))).resolve())


def _installed(wanted: Requirement) -> Distribution | None:
    """The first on the path whose version is asked for: an environment over another one may hide a newer one's."""
    there = distributions(name=wanted.name)
    return next((one for one in there if wanted.specifier.contains(one.version, prereleases=True)), None)


def _applying(requirements: list[Requirement], extra: str) -> list[Requirement]:
    return [one for one in requirements if one.marker is None or one.marker.evaluate({"extra": extra})]
