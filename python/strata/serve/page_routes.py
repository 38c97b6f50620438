"""The page at `/`: files of this package as they are, under a policy by which nothing but them runs or is loaded.

The files hold no data: what the page shows it asks of `/status`, with a key where the server wants one.
"""

from __future__ import annotations

from importlib import resources

from fastapi import APIRouter
from starlette.responses import Response

from strata.serve.errors import ApiError

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    # After an update of the server, the old page must not ask the new one.
    "Cache-Control": "no-cache",
}


def _files() -> dict[str, tuple[bytes, str]]:
    """Every file of the page by its name: content and media type."""
    folder = resources.files("strata.serve").joinpath("page")
    found = {}
    for file in folder.iterdir():
        kind = file.name.rpartition(".")[2]
        if kind in _TYPES:
            found[file.name] = (file.read_bytes(), _TYPES[kind])
    return found


def page_router() -> APIRouter:
    """The routes of the page's files."""
    router = APIRouter(include_in_schema=False)
    files = _files()

    def send(name: str) -> Response:
        content, kind = files[name]
        return Response(content, headers=_HEADERS, media_type=kind)

    @router.get("/")
    async def index() -> Response:
        """The page."""
        return send("index.html")

    @router.get("/page/{name}")
    async def part(name: str) -> Response:
        """What the page loads. Raises ApiError 404."""
        if name not in files:
            raise ApiError(404, f"the page has no file {name!r}", "not_found")
        return send(name)

    return router
