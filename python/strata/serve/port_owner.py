"""Who listens on a port, as far as this user may know: from /proc, without a child process. Keys in its command line
are not repeated.
"""

from __future__ import annotations

import ipaddress
import os
import pwd
import re
from collections.abc import Iterator
from pathlib import Path

_LISTENING = "0A"
_SHOWN = 120
_SECRET = re.compile(r"(--[\w-]*(?:key|secret|password|token\b)[\w-]*[= ])(?:(?!--)\S+ ?)+")
_PROC = Path("/proc")


def owner_of(address: str, port: int) -> str | None:
    """E.g. `process 4242 (python -m http.server 8000)`; without its process where that is another user's: `a process of
    the user www-data`. None if nobody is found."""
    for inode, user in _listeners(address, port):
        process = _process_with(f"socket:[{inode}]")
        if process is not None:
            return f"process {process} ({command_of(process)})"
        return f"a process of the user {_name_of(user)}"
    return None


def _listeners(address: str, port: int) -> Iterator[tuple[str, int]]:
    """Inode and user of each listening socket that keeps others from this address."""
    wanted = ipaddress.ip_address(address)
    for table in ("tcp", "tcp6"):
        for line in _lines_of(_PROC / "net" / table)[1:]:
            fields = line.split()
            place, _, number = fields[1].rpartition(":")
            if fields[3] != _LISTENING or int(number, 16) != port:
                continue
            found = _address_in(place)
            if found == wanted or found.is_unspecified or wanted.is_unspecified:
                yield fields[9], int(fields[7])


def _address_in(digits: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """The address that the kernel writes as words in the machine's byte order (little-endian where Strata runs)."""
    words = [bytes.fromhex(digits[place : place + 8])[::-1] for place in range(0, len(digits), 8)]
    address = ipaddress.ip_address(b"".join(words))
    mapped = getattr(address, "ipv4_mapped", None)
    return mapped or address


def _process_with(link: str) -> int | None:
    """The process that has a file open, if this user may look into it."""
    for folder in _PROC.iterdir():
        if not folder.name.isdigit():
            continue
        try:
            if any(os.readlink(entry) == link for entry in (folder / "fd").iterdir()):
                return int(folder.name)
        except OSError:
            continue  # another user's, or it has ended meanwhile
    return None


def command_of(process: int) -> str:
    """A process's command line, shortened."""
    try:
        content = (_PROC / str(process) / "cmdline").read_bytes()
    except OSError:
        return "it has just ended"
    command = content.rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")
    command = _SECRET.sub(r"\1... ", command).strip()
    return command if len(command) <= _SHOWN else command[:_SHOWN] + "..."


def _lines_of(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").splitlines()
    except OSError:
        return []  # a kernel without IPv6, or no /proc


def _name_of(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)
