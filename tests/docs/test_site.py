"""``make docs``, as a reader of the site gets it."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT


@pytest.mark.long
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    """From requirements/docs.txt alone; every page is found by the search; every picture is there."""
    built = subprocess.run(
        ["make", "docs", f"DOCS_VENV={tmp_path / 'venv'}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    site = ROOT / "site"
    index = json.loads((site / "search/search_index.json").read_text())
    found = {entry["location"].partition("#")[0] for entry in index["docs"]}
    for page in (ROOT / "docs").rglob("*.md"):
        name = "index" if page.stem == "README" else page.stem
        path = page.relative_to(ROOT / "docs").with_name(f"{name}.html")
        assert (site / path).exists(), page
        assert str(path) in found, page
    for html in site.rglob("*.html"):
        for source in re.findall(r'<img[^>]*src="([^":]+)"', html.read_text()):
            assert (html.parent / source).exists(), f"{html}: {source}"
