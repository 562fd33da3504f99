"""mkdocs hook: pages of docs/ link to files of the repository, and the site has no repository behind it.

What they link to outside docs/ comes into the site: Markdown as a page, any other file as it is. A link to a
folder leads to its README, and without one becomes plain text. Links of such pages are followed in turn.
A page that would fetch anything from elsewhere when it is read ends the build.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any
from urllib.parse import urldefrag

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)\s]+)\)")
FETCHED = re.compile(r"<(?:script|img|iframe|source|video|link)\b[^>]*\b(?:src|href)=[\"']?(?:https?:)?//")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def source(uri: str) -> str:
    """Where a page's text lies, from the repository's root."""
    return uri.removeprefix("repo/") if uri.startswith("repo/") else f"docs/{uri}"


def place(path: str) -> str:
    """Where a file of the repository is in the site."""
    return path.removeprefix("docs/") if path.startswith("docs/") else f"repo/{path}"


def target(uri: str, link: str) -> str | None:
    """The file of the repository that a page's link leads to; None: a folder that has no README."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source(uri)), urldefrag(link).url))
    if (ROOT / path).is_dir():
        path = f"{path}/README.md"
        return path if (ROOT / path).exists() else None
    return path


def on_files(files: Files, /, *, config: MkDocsConfig) -> Files:
    """Add what is linked from outside docs/, and what that links to."""
    waiting = [file.src_uri for file in files.documentation_pages()]
    while waiting:
        uri = waiting.pop()
        for _, _, link in LINK.findall(FENCE.sub("", (ROOT / source(uri)).read_text())):
            path = target(uri, link)
            if path is None or files.get_file_from_path(place(path)) or not (ROOT / path).exists():
                continue
            file = File.generated(
                config, place(path), abs_src_path=str(ROOT / path), inclusion=InclusionLevel.NOT_IN_NAV
            )
            files.append(file)
            if path.endswith(".md"):
                waiting.append(file.src_uri)
    return files


def on_page_markdown(markdown: str, /, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links to files, and pictures, into links within the site."""
    uri = page.file.src_uri

    def led(match: re.Match[str]) -> str:
        image, text, link = match.groups()
        path = target(uri, link)
        if path is None:
            return text
        anchor = urldefrag(link).fragment
        relative = posixpath.relpath(place(path), posixpath.dirname(uri) or ".")
        return (
            f"{image}[{text}]({relative}{'#' if anchor else ''}{anchor})" if urldefrag(link).url else match[0]
        )

    parts: list[Any] = re.split(f"({FENCE.pattern})", markdown, flags=FENCE.flags)
    return "".join(part if part.startswith("```") else LINK.sub(led, part) for part in parts)


def on_post_page(output: str, /, *, page: Page, config: MkDocsConfig) -> str:
    """Refuse what a browser would fetch from another host."""
    if found := FETCHED.search(output):
        raise PluginError(f"{page.file.src_uri} fetches from elsewhere: {found[0]}")
    return output
