"""No link of any page leads nowhere: not to a file, not to a heading; and every page is found."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest
import yaml

from tests.docs.blocks import PAGES, ROOT

DOCS = ROOT / "docs"


def prose(text: str) -> str:
    """A page without its code, which holds no links and no headings."""
    return re.sub(r"^( *)```.*?^\1```", "", text, flags=re.MULTILINE | re.DOTALL)


def links(text: str) -> list[str]:
    """The targets of a page's relative links."""
    targets = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", prose(text)))
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


def anchors(text: str) -> set[str]:
    """What GitHub and mkdocs call a page's headings, as far as they agree."""
    found: set[str] = set()
    for heading in re.findall(r"^#{1,6} (.+)$", prose(text), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.replace("`", "")).lower().strip()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        number = 1
        while (again := slug if number == 1 else f"{slug}-{number - 1}") in found:
            number += 1
        found.add(again)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_row_is_in_a_table(page: Path) -> None:
    """Rows behind an empty line, or without a head, are shown as they are typed."""
    for table in re.findall(r"^(?:\|.*\n?)+", prose(page.read_text()), re.MULTILINE):
        assert re.match(r"\|.*\|\n\|[-:| ]+\|(\n|$)", table), table[:200]


def nav(entry: object) -> list[str]:
    """The pages of the site's navigation, in their order."""
    if isinstance(entry, str):
        return [entry]
    parts = entry.values() if isinstance(entry, dict) else entry
    assert isinstance(parts, Iterable)
    return [page for part in parts for page in nav(part)]


def site() -> dict[str, object]:
    """``mkdocs.yml``; its one tag of Python's is a function that is not called here."""

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)
    found = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)  # noqa: S506 - it is a SafeLoader
    assert isinstance(found, dict)
    return found


def test_links_are_found() -> None:
    """A relative link is seen; one to a site, or in code, is not one."""
    text = "[a](b.md) [c](https://example.org) `[d](e.md)`\n```\n[f](g.md)\n```\n"
    assert links(text) == ["b.md"]


def test_anchors_are_what_readers_see() -> None:
    """Code, punctuation and repeats."""
    assert anchors("# A `b-c`: d!\n## --e\n## --e\n```\n# no\n```\n") == {"a-b-c-d", "--e", "--e-1"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page: Path) -> None:
    """Every relative link leads to a file, and to a heading that is in it."""
    text = page.read_text()
    for link in links(text):
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), f"{page}: {link}"
        assert target.is_relative_to(ROOT), f"{page}: {link} leaves the repository"
        if anchor:
            assert anchor in anchors(target.read_text()), f"{page}: {link}"


@pytest.mark.parametrize("folder", ["adr", "howto", "lab", "reference", "tutorials"])
def test_every_page_is_linked(folder: str) -> None:
    """A page that no other page links to is not found by readers."""
    reached = {
        (page.parent / link.partition("#")[0]).resolve()
        for page in PAGES
        for link in links(page.read_text())
        if link.partition("#")[0]
    }
    assert {page for page in (DOCS / folder).glob("*.md") if page.name != "README.md"} <= reached


def test_every_page_is_in_the_navigation() -> None:
    """Once, and no entry is for a page that is not there. Lab notes are outside of it."""
    pages = nav(site()["nav"])
    told = (str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))
    assert sorted(pages) == sorted(page for page in told if not page.startswith("lab/"))


def test_nothing_is_fetched_when_the_site_is_read() -> None:
    """No web fonts, no repository to ask for stars, nothing beside what mkdocs brings along."""
    told = site()
    assert isinstance(theme := told["theme"], dict)
    assert theme["font"] is False
    assert not told.keys() & {"repo_url", "extra_javascript", "extra_css", "extra"}
