"""Every promise of docs/security.md has a test that quotes it, and no test quotes another one."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PAGE = (HERE.parents[1] / "docs" / "security.md").read_text()


def promises() -> list[str]:
    """The list items of the page's section of promises, each on one line."""
    (section,) = re.findall(r"^## What is promised\n(.*?)(?=^## )", PAGE, re.MULTILINE | re.DOTALL)
    items = re.findall(r"^- (.*(?:\n  .*)*)", section, re.MULTILINE)
    return [" ".join(item.split()) for item in items]


def quoted() -> dict[str, str]:
    """Test → its docstring, of every module here but this one."""
    found = {}
    for path in HERE.glob("test_*.py"):
        if path == Path(__file__):
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                found[node.name] = " ".join((ast.get_docstring(node) or "").split())
    return found


def test_promises_are_found() -> None:
    """The page promises something, and nothing twice."""
    assert len(promises()) > 20
    assert len(set(promises())) == len(promises())


@pytest.mark.parametrize("promise", promises())
def test_the_promise_is_tested(promise: str) -> None:
    """A test has the line for its docstring."""
    assert promise in quoted().values()


@pytest.mark.parametrize("name", quoted())
def test_the_test_is_of_a_promise(name: str) -> None:
    """A line that was changed in the page alone, or is gone from it, is found here."""
    assert quoted()[name] in promises()
