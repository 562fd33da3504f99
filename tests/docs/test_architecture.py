"""The flows of docs/architecture.md can be followed: each file and function is there, and calls lead on."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from lora_fs.sidecar.model import Phase

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/architecture.md").read_text()
FLOWS = ("A registration", "A change reaches an engine", "A request")
MOST_HOPS = 10
HOP = re.compile(r"^\d+\. `(?P<file>[\w/]+\.py)` `(?P<function>[\w.]+)`", re.MULTILINE)
A_PATH = re.compile(r"`((?:sidecar|worker_patch|kernels|schemas|tests)/[\w./]+)`")


class Hop(NamedTuple):
    """A file, and a function or method in it."""

    file: str
    function: str


def hops(flow: str) -> list[Hop]:
    text = PAGE.partition(f"\n## {flow}\n")[2].partition("\n## ")[0]
    found = [Hop(match["file"], match["function"]) for match in HOP.finditer(text)]
    assert len(found) == len(re.findall(r"^\d+\. ", text, re.MULTILINE)), "a hop names no file and function"
    return found


def functions(file: str) -> set[str]:
    """Those of a module, methods as ``Class.method``."""
    tree = ast.parse((ROOT / file).read_text())
    defined = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = {node.name for node in tree.body if isinstance(node, defined)}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{one.name}" for one in node.body if isinstance(one, defined)}
    return found


@pytest.mark.parametrize("flow", FLOWS)
def test_every_hop_is_there(flow: str) -> None:
    """At most ten a flow, each a file of this project and a function of that file."""
    found = hops(flow)
    assert 5 <= len(found) <= MOST_HOPS
    assert [hop for hop in found if hop.function not in functions(hop.file)] == []


@pytest.mark.parametrize("flow", FLOWS)
def test_every_hop_leads_on(flow: str) -> None:
    """What a hop names is used, by its last name or its class's, in the file of a hop before it."""
    found = hops(flow)
    for at, hop in enumerate(found[1:], 1):
        before = "\n".join((ROOT / earlier.file).read_text() for earlier in found[:at])
        names = [part for part in hop.function.split(".") if not part.startswith("__")]
        assert any(re.search(rf"\b{name}\b", before) for name in names), f"nothing before leads to {hop}"


def test_every_decision_names_files_that_are_there() -> None:
    """A path on a page of docs/adr is one of this project."""
    missing = [
        f"{page.name}: {path}"
        for page in sorted((ROOT / "docs/adr").glob("*.md"))
        for path in A_PATH.findall(page.read_text())
        if not (ROOT / path).exists()
    ]
    assert missing == []


def heads(picture: str) -> set[str]:
    """What the boxes of a picture are called."""
    return set(re.findall(r'<text class="h"[^>]*>([^<]+)</text>', (ROOT / "docs" / picture).read_text()))


def test_the_picture_of_the_parts_names_folders() -> None:
    """What is no program of others is a folder of the sidecar."""
    named = {
        one.strip()
        for head in heads("parts.svg") - {"any client", "vLLM"}
        for one in head.removesuffix(", on the shared volume").split(",")
    }
    assert len(named) >= 9
    assert [one for one in named if not (ROOT / "sidecar" / one).is_dir()] == []


def test_the_picture_of_a_revision_names_every_phase() -> None:
    """As `lora-fs status` does; a phase that only some adapters have may be left out."""
    assert {str(phase) for phase in Phase} - heads("revision.svg") == {"Downloading", "Failed"}
