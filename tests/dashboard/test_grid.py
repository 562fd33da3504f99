"""The grid: whoever has any version and takes the changes since has what who asks for all has."""

from __future__ import annotations

import json
from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st

from lora_fs.sidecar.server.dashboard.grid import LETTERS, Column, Grid, Row

Report = tuple[dict[str, str], dict[str, str]]
Step = tuple[dict[str, str], dict[str, Report], frozenset[str]]

NAMES = [f"n{number}" for number in range(6)]
REPLICAS = ["r0", "r1", "r2"]
SPACE = frozenset({"default"})

names = st.sampled_from(NAMES)
revisions = st.sampled_from(["v1", "v2"])
registries = st.dictionaries(names, revisions, max_size=6)
cells = st.dictionaries(names, st.sampled_from(sorted(LETTERS.values())), max_size=6)
whys = st.dictionaries(names, st.sampled_from(["", "digest-mismatch", 'it says "no"']), max_size=2)
reports = st.dictionaries(st.sampled_from(REPLICAS), st.tuples(cells, whys), max_size=3)
steps = st.lists(st.tuples(registries, reports, st.frozensets(st.sampled_from(REPLICAS))), max_size=12)


def rows_of(registered: dict[str, str]) -> dict[str, Row]:
    return {name: Row(name, "default", revision) for name, revision in registered.items()}


def column(told: dict[str, str], why: dict[str, str], rows: dict[str, Row]) -> Column:
    unknown = {name: Row(name, "default", "v9") for name in told if name not in rows}
    return Column(SPACE, told, why, unknown)


def read(grid: Grid, since: int, known: dict[str, list[object]]) -> dict[str, list[object]]:
    """A reader's table after it took the changes."""
    if since < grid.floor:
        known, since = {}, -1
    gone = {name for _, name in grid.gone(since)}
    changed = {row[0]: row for row in map(json.loads, texts(grid.rows(since)))}
    return {name: row for name, row in known.items() if name not in gone} | changed


def texts(rows: Iterable[tuple[str, bytes]]) -> list[bytes]:
    return [text for _, text in rows]


@settings(max_examples=100)
@given(steps, st.data())
def test_changes_lead_to_the_whole(taken: list[Step], data: st.DataObject) -> None:
    """A reader that looks at any of the versions ends with the same rows as one that comes last."""
    grid, version, since, known = Grid(), 0, -1, dict[str, list[object]]()
    for registered, told, gone in taken:
        rows = rows_of(registered)
        columns = {r: column(c, w, rows) for r, (c, w) in told.items() if r not in gone}
        if grid.update(version + 1, rows, columns, gone):
            version += 1
        if data.draw(st.booleans()):
            known, since = read(grid, since, known), version
    assert read(grid, since, known) == read(grid, -1, {})


def test_a_cell_that_changes_changes_its_row_alone() -> None:
    """And a column that says the same again changes nothing."""
    rows = rows_of(dict.fromkeys(NAMES, "v1"))
    grid = Grid()
    assert grid.update(1, rows, {"r0": Column(SPACE, {"n1": "R"})})
    assert not grid.update(2, rows, {"r0": Column(SPACE, {"n1": "R"})})
    assert grid.update(2, rows, {"r0": Column(SPACE, {"n1": "R", "n4": "F"}, {"n4": "torn"})})
    assert [json.loads(text)[0] for text in texts(grid.rows(1))] == ["n4"]
    assert json.loads(texts(grid.rows(1))[0])[6:8] == ["F", "torn"]


def test_what_a_replica_does_not_serve_is_not_unloaded() -> None:
    """A replica of another namespace has no cell there, rather than an empty one."""
    grid = Grid()
    grid.update(1, {"a": Row("a", "team-a", "v1")}, {"r0": Column(frozenset({"team-b"}))})
    assert json.loads(texts(grid.rows(0))[0])[6] == " "
