"""What the comparison says of others can be checked: each statement has a source, each source a date."""

from __future__ import annotations

import re

from lora_fs.sidecar import __version__
from tests.docs.blocks import ROOT

TEXT, _, LIST = (ROOT / "docs/comparison.md").read_text().partition("## Sources")
SOURCES = dict(re.findall(r"^\| \[(\d+)\] \| (.*) \|$", LIST, re.MULTILINE))
# A commit, a release or a day; of an issue its number, of a site that has no releases the day it was read.
DATED = r"at `[0-9a-f]{8}`|\d+\.\d+\.\d+|of 20\d\d-\d\d-\d\d|, open|, closed|^SGLang: "


def test_sources_are_found() -> None:
    """They are numbered from 1."""
    assert list(SOURCES) == [str(number) for number in range(1, len(SOURCES) + 1)]
    assert len(SOURCES) > 10


def test_every_source_is_used_and_every_number_is_one() -> None:
    """No statement points into the void."""
    assert set(re.findall(r"\[(\d+)\]", TEXT)) == SOURCES.keys()


def test_every_source_can_be_found_again() -> None:
    """By its commit, its release, its number or its day."""
    assert re.search(r"Read on 20\d\d-\d\d-\d\d\.", LIST)
    assert [source for source in SOURCES.values() if not re.search(DATED, source)] == []


def test_every_row_about_others_has_a_source() -> None:
    """A table's row, and each thing that others do better."""
    rows = [row for row in re.findall(r"^\| .*\|$", TEXT, re.MULTILINE) if not row.startswith("| |")]
    points = re.findall(r"^- \*\*.*?(?=^- |\n\n)", TEXT, re.MULTILINE | re.DOTALL)
    headings = {"| An operator's question | lora-fs | Elsewhere |"}
    bare = [row for row in [*rows, *points] if not re.search(r"\[\d+\]", row) and row not in headings]
    assert [row for row in bare if not row.startswith(("| **lora-fs**", "- **Age.**"))] == []


def test_the_version_is_this_one() -> None:
    """What it says of itself is current."""
    assert f"version {'.'.join(__version__.split('.')[:2])}," in TEXT
