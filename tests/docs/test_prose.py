"""The words of pages and docstrings: short sentences, no phrase that hides who does what."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest

from tests.docs.blocks import ROOT


def checker() -> ModuleType:
    """``.ci/prose.py``, as a module."""
    spec = importlib.util.spec_from_file_location("prose", ROOT / ".ci/prose.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["prose"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


PROSE = checker()
LONG = " ".join(["word"] * 26)


def faults(text: str) -> list[str]:
    """The line and the beginning of each message."""
    return [f"{fault.line}: {fault.message[:18]}" for fault in PROSE.judged("p.md", text)]


def test_every_sentence_is_plain() -> None:
    """No page and no docstring has a sentence over 25 words or a banned phrase."""
    found = [str(fault) for path, first, text in PROSE.texts() for fault in PROSE.judged(path, text, first)]
    assert found == []


def test_pages_and_docstrings_are_found() -> None:
    """The README, a page, and docstrings of all three folders are read; records are not."""
    seen = {path for path, _, _ in PROSE.texts()}
    assert {"README.md", "docs/quickstart.md", "CONTRIBUTING.md"} <= seen
    assert all(any(path.startswith(f"{folder}/") for path in seen) for folder in PROSE.FOLDERS)
    assert not any(path.startswith("docs/adr/") for path in seen)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{LONG}.", ["1: 26 words in a sent"]),
        (f"Short.\n\n- One.\n- {LONG}", ["4: 26 words in a sent"]),
        (f"| a |\n|---|\n| {LONG} |", ["3: 26 words in a sent"]),
        ("He is told.", ["1: say it plainly: 'i"]),
        ("It was\nnot told.", ["1: say it plainly: 'w"]),
        ("`it is told`, [a](is-told.md)", []),
        (f"```text\n{LONG}\n```\n# {LONG}\n<!-- {LONG} -->", []),
        (" ".join(["word"] * 13) + ": " + " ".join(["word"] * 13), []),
        ("2 is 3 times that of it", ["1: say it plainly: 't"]),
        (f"    ├── {LONG}", []),
    ],
)
def test_a_fault_is_found_where_it_is(text: str, expected: list[str]) -> None:
    """In paragraphs, lists and tables, over line breaks; never in code, headings, comments or trees."""
    assert faults(text) == [line[: len("1: ") + 18] for line in expected]


def test_code_is_one_word() -> None:
    """A command of many words in backticks does not make a sentence long."""
    assert faults("Run `" + " ".join(["x"] * 40) + "` now.") == []


@pytest.mark.parametrize(("sentence", "passive"), [("It was taken.", True), ("He takes it.", False)])
def test_the_passive_is_seen(sentence: str, passive: bool) -> None:
    """It is a warning: counted, and no fault."""
    assert bool(PROSE.PASSIVE.search(sentence)) is passive
    assert faults(sentence) == []
