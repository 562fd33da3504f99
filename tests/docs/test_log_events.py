"""The tables of the log's events have every event that the code logs, and no other one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.docs.blocks import ROOT

# What passes an event's name on: function → where the name is among its arguments.
PASSES = {"event": 0, "told": 0, "_keep": 4}
# Where such a function gets the name from its own caller.
PASSED_ON = {"sidecar/registry/drops/disappearances.py", "sidecar/registry/drops/candidates.py"}
DROPS = ROOT / "sidecar/registry/drops"


def calls() -> Iterator[tuple[str, ast.expr]]:
    """The module and the name of each call that logs an event."""
    for folder in ("sidecar", "worker_patch", "kernels", "examples/local"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call):
                    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                    at = PASSES.get(name)
                    if (
                        at is not None
                        and len(node.args) > at
                        and (name == "event" or path.is_relative_to(DROPS))
                    ):
                        yield str(path.relative_to(ROOT)), node.args[at]


def logged() -> set[str]:
    """The name of every event in the code, of an expression each one that it may be."""
    found = set()
    for module, name in calls():
        texts = {one.value for one in ast.walk(name) if isinstance(one, ast.Constant)}
        assert texts or module in PASSED_ON, f"{module}: write the event's name where it is logged"
        found |= {str(text) for text in texts if isinstance(text, str)}
    return found


def in_tables() -> list[str]:
    """The names in the first column of the page's tables of events, a row after the other."""
    page = (ROOT / "docs/howto/observe.md").read_text()
    tables = re.findall(r"^\| Event \|.*\n\|[-|]+\n((?:\|.*\n)+)", page, re.MULTILINE)
    first = (row.split(" | ")[0] for table in tables for row in table.splitlines())
    return [name for cell in first for name in re.findall(r"`([\w.]+)`", cell)]


def test_events_are_found() -> None:
    """Those of a plain call, of one of two names, and of a helper that passes the name on."""
    known = {"load.done", "placement.replica_gone", "folder.unlisted", "adoption.retried", "audit"}
    assert known <= logged()
    assert not [name for name in logged() if not re.fullmatch(r"[a-z_]+(\.[a-z_]+)?", name)]


def test_every_event_is_in_a_table() -> None:
    """An operator who searches for the event of a line finds what it means."""
    assert logged() - set(in_tables()) == set()


def test_every_row_is_an_event() -> None:
    """No row outlives its code."""
    assert set(in_tables()) - logged() == set()
