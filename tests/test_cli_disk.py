"""`strata inspect` and `strata purge` over roots that an engine wrote."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from strata._core import disk_inspect, disk_purge
from strata.cli.disk_report import show
from strata.cli.main import main
from strata.errors import StorageError

FINGERPRINT = "ab" * 32
OTHER = "cd" * 32
MARKER = "strata-disk-root"


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Exit code, output and errors of one command."""
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root with two fingerprints whose segments are damaged, since no engine wrote them."""
    folder = tmp_path / "kv"
    for fingerprint in (FINGERPRINT, OTHER):
        (folder / fingerprint).mkdir(parents=True)
        for extension in ("kh", "kv"):
            (folder / fingerprint / f"segment-000000.{extension}").write_bytes(b"x" * 5000)
    (folder / MARKER).write_text("strata disk root, format 1\n")
    (folder / "lock").write_text("")
    return folder


@pytest.fixture
def locked(root: Path) -> Iterator[Path]:
    """The root while this process owns it."""
    with (root / "lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield root


def test_inspect_prints_a_table(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "notes.txt").write_text("mine")
    code, out, _ = run(capsys, "inspect", root)
    assert code == 0
    assert "not in use" in out and FINGERPRINT[:12] in out and "1 more segments cannot be read" in out
    assert "not Strata's" in out and "notes.txt" in out


def test_a_table_of_a_full_disk_fits_eighty_columns() -> None:
    folder = {
        "fingerprint": FINGERPRINT,
        "page_size": 16,
        "page_bytes": 16 * 114_688,
        "bytes": 1_234_567_890_123,
    }
    folder |= {
        "segments": 12_345,
        "whole": 1_234_567,
        "blank": 1_234_567,
        "damaged": 12,
        "damaged_segments": 0,
    }
    folder |= {"verified": 1_234_560, "corrupt": 7}
    found = {"fingerprints": [folder], "bytes": 1_234_567_890_123, "in_use": False, "owner": None}
    out = io.StringIO()
    show(Console(file=out, width=80), Path("kv"), found, verified=True)
    lines = [line.strip() for line in out.getvalue().splitlines()]
    (row,) = [line for line in lines if line.startswith(f"{FINGERPRINT[:12]} ")]
    assert row.split()[4:9] == ["12345", "1234567", "1234567", "12", "1.1"], row
    assert f"{FINGERPRINT[:12]}: 1,234,560 payloads have their checksum, 7 do not" in lines


def test_inspect_prints_json(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "inspect", root, "--json", "--verify")
    found = json.loads(out)
    assert code == 0 and found["verified"] and not found["in_use"]
    assert [folder["fingerprint"] for folder in found["fingerprints"]] == [FINGERPRINT, OTHER]
    assert found["fingerprints"][0]["damaged_segments"] == 1
    assert found["bytes"] == sum(folder["bytes"] for folder in found["fingerprints"]) + used(root)


def used(root: Path) -> int:
    """Bytes on disk of the root's own entries."""
    own = [root, root / MARKER, root / "lock"]
    return sum(path.stat().st_blocks * 512 for path in own)


def test_inspect_of_a_root_in_use_says_so(locked: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "inspect", locked)
    assert code == 0 and f"in use by process {os.getpid()}" in out


@pytest.mark.parametrize("command", [["inspect"], ["purge", "--yes"]])
def test_a_folder_that_is_no_root_is_refused(
    tmp_path: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    code, _, err = run(capsys, *command, tmp_path)
    assert code == 1 and MARKER in err and "--disk-path" in err
    code, _, err = run(capsys, *command, tmp_path / "missing")
    assert code == 1 and "missing" in err
    assert (tmp_path / "thesis.tex").read_text() == "mine"


def test_purge_refuses_a_root_in_use(locked: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "purge", locked, "--yes")
    assert code == 1 and f"process {os.getpid()}" in err
    with pytest.raises(StorageError, match="in use"):
        disk_purge(locked)
    assert len(disk_inspect(locked)["fingerprints"]) == 2


def test_purge_asks_nobody_without_a_terminal(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    code, _, err = run(capsys, "purge", root)
    assert code == 1 and "--yes" in err
    assert (root / FINGERPRINT).exists()


def test_purge_with_yes_deletes_the_root(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "purge", root, "--yes")
    assert code == 0 and "deleted 6 files" in out
    assert not root.exists()


def test_purge_prints_json(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "notes.txt").write_text("mine")
    code, out, _ = run(capsys, "purge", root, "--yes", "--json")
    purged = json.loads(out)
    assert code == 0 and purged["fingerprints"] == [FINGERPRINT, OTHER] and purged["bytes"] > 0
    assert purged["left"] == [str(root / "notes.txt")]
    assert [path.name for path in root.iterdir()] == ["notes.txt"]


def test_purge_of_one_fingerprint(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "purge", root, "--fingerprint", "ee", "--yes")
    assert code == 1 and "strata inspect" in err
    code, _, _ = run(capsys, "purge", root, "--fingerprint", OTHER[:8], "--yes")
    assert code == 0
    assert (root / FINGERPRINT).exists() and not (root / OTHER).exists() and (root / MARKER).exists()


@pytest.mark.parametrize(("answer", "code"), [("n", 1), ("", 1), ("y", 0)])
def test_purge_asks_at_a_terminal(root: Path, answer: str, code: int) -> None:
    master, terminal = pty.openpty()
    try:
        os.write(master, f"{answer}\n".encode())
        command = [sys.executable, "-m", "strata.cli.main", "purge", str(root)]
        done = subprocess.run(
            command, stdin=terminal, capture_output=True, text=True, timeout=60, check=False
        )
    finally:
        os.close(terminal)
        os.close(master)
    assert done.returncode == code, done.stderr
    assert "It cannot be undone" in done.stdout
    assert root.exists() == (code == 1)
