"""A browser for the page's tests: Debian's chromium, which Playwright drives. Run as a program, this installs it.

Only root can install it, where there is apt-get. Elsewhere those tests are skipped, and say why.
"""

from __future__ import annotations

import os
import shutil
import subprocess

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
_LIMIT_S = 240
_COMMANDS = (
    ["apt-get", "update", "-qq"],
    ["apt-get", "install", "-y", "-qq", "--no-install-recommends", "chromium"],
)


def find_browser() -> str | None:
    """Path of a browser that Playwright can drive."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


def install() -> str | None:
    """Has apt-get fetch Debian's. Returns why it could not, in a sentence, or None."""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        return "installing it takes root and apt-get"
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in _COMMANDS:
        try:
            done = subprocess.run(
                command, env=environment, stdout=subprocess.DEVNULL, check=False, timeout=_LIMIT_S
            )
        except subprocess.TimeoutExpired:
            return f"`{' '.join(command)}` took longer than {_LIMIT_S} s"
        if done.returncode != 0:
            return f"`{' '.join(command)}` failed; its message is above"
    return None if find_browser() else "the package chromium brought no browser"


def main() -> None:
    """Installs a browser unless there is one. The suite goes on without."""
    if find_browser() is None:
        print("Installing Debian's chromium for the tests of the page", flush=True)
        problem = install()
        if problem is not None:
            print(f"no browser: {problem}. The tests of the page are skipped", flush=True)


if __name__ == "__main__":
    main()
