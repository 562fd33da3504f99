"""How pages and examples install lora-fs works where a reader types it."""

from __future__ import annotations

import re

from tests.docs.blocks import PAGES, ROOT

FILES = [*PAGES, *sorted((ROOT / "examples").rglob("*.yml")), *sorted((ROOT / "examples").rglob("*.yaml"))]
FROM_INDEX = re.compile(r"""pip install (?:-\S+ )*['"]?lora-fs\b""")


def test_an_index_is_found() -> None:
    """With an extra in quotes, and behind options; a clone is none."""
    assert FROM_INDEX.search("`pip install 'lora-fs[sign]'`")
    assert FROM_INDEX.search("pip install --upgrade lora-fs")
    assert not FROM_INDEX.search("pip install './.lora-fs[evaluate]'")
    assert not FROM_INDEX.search("pip install '.[sign]'")


def test_nothing_is_installed_from_an_index() -> None:
    """None has lora-fs: pip would install nothing, or what somebody else puts there under its name."""
    assert "there is no package index" in (ROOT / "docs/release.md").read_text()
    assert [str(file) for file in FILES if FROM_INDEX.search(file.read_text())] == []
