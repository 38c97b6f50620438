"""Brings what lies outside docs/ into the site that mkdocs builds: README is its first page, ARCHITECTURE and
CONTRIBUTING are pages too, other files that a page links to are copied; links follow. In the repository all links stay
as they are.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"README.md": "index.md", "ARCHITECTURE.md": "ARCHITECTURE.md", "CONTRIBUTING.md": "CONTRIBUTING.md"}
"""Pages from the repository's root -> their places in the site."""
LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?!\w+:|#)(?P<path>[^)\s#]+)(?P<anchor>#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages and the files that they and the guides link to."""
    for source, target in PAGES.items():
        files.append(File.generated(config, target, content=(ROOT / source).read_text(encoding="utf-8")))
    for source in [*PAGES, *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]:
        for link in LINK.finditer((ROOT / source).read_text(encoding="utf-8")):
            target = _in_site(_linked(source, link["path"]))
            file = ROOT / _linked(source, link["path"])
            if target is not None and target.startswith("files/") and file.is_file():
                files.append(File.generated(config, target, content=file.read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Points links to where their targets lie in the site; a link to a folder becomes its text."""
    pages = {target: source for source, target in PAGES.items()}
    source = pages.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def moved(link: re.Match[str]) -> str:
        target = _in_site(_linked(source, link["path"]))
        return link["text"] if target is None else f"[{link['text']}]({target}{link['anchor'] or ''})"

    return LINK.sub(moved, markdown)


def _linked(source: str, path: str) -> str:
    """The repository's path of what a page links to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), path))


def _in_site(path: str) -> str | None:
    """Where a file of the repository lies in the site, None for a folder. One that there is not keeps its name, so that
    mkdocs complains."""
    if (ROOT / path).is_dir():
        return None
    if path in PAGES:
        return PAGES[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else f"files/{path}"
