"""Test help: a hub over HTTP that serves folders, and notes what it is asked for."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """``models``: repository -> folder. ``gated``: those that want ``token``. ``cut_after``: bytes after which a
    download breaks off, once."""

    models: dict[str, Path] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    token: str = "hf_right"
    cut_after: int | None = None
    url: str = ""
    asked: list[str] = field(default_factory=list)

    @property
    def fetched(self) -> set[str]:
        """Names of the files whose bytes were asked for."""
        return {
            line.rpartition("/")[2] for line in self.asked if line.startswith("GET") and "/resolve/" in line
        }


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """A hub on a port of this machine, for as long as the block lasts."""
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def _answer(self, with_body: bool) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.asked.append(f"{self.command} {path}")
            parts = path.removeprefix("/api/models").strip("/").split("/")
            repository = "/".join(parts[:2])
            folder = hub.models.get(repository)
            allowed = self.headers.get("authorization") == f"Bearer {hub.token}"
            if folder is None:
                return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, with_body)
            if repository in hub.gated and not allowed:
                return self._send(403, b"{}", {"X-Error-Code": "GatedRepo"}, with_body)
            kind, rest = parts[2], parts[3:]
            if rest[0] not in ("main", COMMIT):
                return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"}, with_body)
            if kind == "revision":
                names = [{"rfilename": file.name} for file in sorted(folder.iterdir())]
                about = {"id": repository, "modelId": repository, "sha": COMMIT, "siblings": names}
                return self._send(200, json.dumps(about).encode(), {}, with_body)
            if kind == "tree":
                entries = [
                    {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": _oid(file)}
                    for file in sorted(folder.iterdir())
                ]
                return self._send(200, json.dumps(entries).encode(), {}, with_body)
            self._send_file(folder / rest[1], with_body)

        def _send_file(self, file: Path, with_body: bool) -> None:
            if not file.is_file():
                return self._send(404, b"", {"X-Error-Code": "EntryNotFound"}, with_body)
            content, status = file.read_bytes(), 200
            headers = {"ETag": f'"{_oid(file)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
            wanted = self.headers.get("range", "")
            if with_body and wanted.startswith("bytes="):
                first = int(wanted.removeprefix("bytes=").split("-")[0])
                headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
                content, status = content[first:], 206
            cut = hub.cut_after
            if with_body and cut is not None and len(content) > cut:
                hub.cut_after = None
                self._send(status, content, headers, with_body, cut)
                self.close_connection = True
                return None
            return self._send(status, content, headers, with_body)

        def _send(
            self, status: int, body: bytes, headers: dict[str, str], with_body: bool, cut: int | None = None
        ) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if with_body:
                self.wfile.write(body[:cut])

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def _oid(file: Path) -> str:
    return hashlib.sha1(file.read_bytes(), usedforsecurity=False).hexdigest()
