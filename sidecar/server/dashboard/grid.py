"""Adapters × replicas: a letter a cell, and which rows changed when. Pure: no I/O, no clock.

The letters lie in one array of bytes, so that 10,000 × 50 cost half a megabyte and a report that
changed costs one column.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lora_fs.sidecar.model import Phase
from lora_fs.sidecar.server.dashboard.usage import Totals

LETTERS: Final = {
    Phase.PENDING: "P",
    Phase.DOWNLOADING: "D",
    Phase.VALIDATING: "V",
    Phase.LOADING: "L",
    Phase.READY: "R",
    Phase.UNLOADED: ".",
    Phase.DRAINING: "G",
    Phase.FAILED: "F",
}
NOT_SERVED: Final = " "
MAX_WHY: Final = 300
MAX_GONE: Final = 4096


@dataclass(frozen=True, slots=True)
class Row:
    """An adapter as the table shows it. ``name`` is what clients call it."""

    name: str
    namespace: str
    revision: str
    policy: str = ""
    size_bytes: int = 0
    rank: int = 0
    labels: str = ""

    def head(self) -> bytes:
        """The row's JSON up to its cells."""
        told = [self.name, self.revision, self.policy, self.size_bytes, self.rank, self.labels]
        return json.dumps(told, separators=(",", ":")).encode().removesuffix(b"]")


@dataclass(frozen=True, slots=True)
class Column:
    """One replica's report. ``cells``: a letter by name; an absent name is unloaded.

    Attributes:
        why: what is wrong, by name. unknown: rows of names that no registry read here has.
    """

    namespaces: frozenset[str]
    cells: Mapping[str, str] = field(default_factory=dict)
    why: Mapping[str, str] = field(default_factory=dict)
    unknown: Mapping[str, Row] = field(default_factory=dict)


class Grid:
    """The table. ``floor``: the oldest version since which it knows every change."""

    def __init__(self) -> None:
        self.floor = 0
        self._version = 0
        self._registered: Mapping[str, Row] = {}
        self._columns: dict[str, Column] = {}
        self._order: tuple[str, ...] = ()
        self._rows: list[Row] = []
        self._heads: list[bytes] = []
        self._index: dict[str, int] = {}
        self._told_only: set[str] = set()  # names that replicas tell of and no registry read here has
        self._namespaces: set[str] = set()
        self._cells: NDArray[np.uint8] = np.zeros((0, 0), np.uint8)
        self._changed: NDArray[np.int64] = np.zeros(0, np.int64)
        self._gone: deque[tuple[int, str, str]] = deque(maxlen=MAX_GONE)
        self._usage: Mapping[str, Totals] = {}

    @property
    def replicas(self) -> tuple[str, ...]:
        """The columns, in the order of the cells' letters."""
        return self._order

    def __len__(self) -> int:
        return len(self._rows)

    def update(
        self,
        version: int,
        registered: Mapping[str, Row],
        changed: Mapping[str, Column],
        gone: frozenset[str] = frozenset(),
    ) -> bool:
        """Take over the look; True if it changes anything, as of ``version``."""
        self._version = version
        before = {replica: self._columns.get(replica) for replica in changed}
        for replica in gone:
            self._columns.pop(replica, None)
        self._columns.update(changed)
        order = tuple(sorted(self._columns))
        unknown = {name: row for column in self._columns.values() for name, row in column.unknown.items()}
        rows_differ = registered is not self._registered or unknown.keys() - self._index.keys()
        self._registered = registered
        if order != self._order:
            self._rebuild({**unknown, **registered}, order)
            return True
        different = False
        if rows_differ or self._told_only - unknown.keys():
            different = self._realign({**unknown, **registered})
        for replica, column in changed.items():
            different |= self._set(replica, column, before[replica])
        return different

    def use(self, usage: Mapping[str, Totals]) -> bool:
        """Take over all sums, by name; True if a row is different now. Call after ``update``."""
        before, self._usage = self._usage, usage
        names = {name for name in before.keys() | usage.keys() if before.get(name) != usage.get(name)}
        differ = [self._index[name] for name in names & self._index.keys()]
        self._changed[differ] = self._version
        return bool(differ)

    def rows(self, since: int) -> Iterator[tuple[str, bytes]]:
        """Namespace and JSON of each row that changed after ``since``, by name.

        The last three values are the requests, those answered with an error, and the mean seconds of a load;
        null where no replica counted any.
        """
        why: dict[str, str] = {}
        for replica in reversed(self._order):  # the first one that has a word on a name says it
            why |= self._columns[replica].why
        for number in np.flatnonzero(self._changed > since):
            row = self._rows[number]
            told = json.dumps(why.get(row.name, "")).encode()
            cells = self._cells[number].tobytes()
            used = self._usage.get(row.name)
            counts = [None] * 3 if used is None else [used.requests, used.errors, used.mean_load_s]
            tail = json.dumps(counts, separators=(",", ":")).encode().removeprefix(b"[")
            yield row.namespace, b'%s,"%s",%s,%s' % (self._heads[number], cells, told, tail)

    def gone(self, since: int) -> Iterator[tuple[str, str]]:
        """Namespace and name of each row that went after ``since``, as far as it did not come back."""
        for version, namespace, name in self._gone:
            if version > since and name not in self._index:
                yield namespace, name

    # -- storage -------------------------------------------------------------------------------

    def _rebuild(self, rows: Mapping[str, Row], order: tuple[str, ...]) -> None:
        """The columns are others: every row is."""
        self._order = order
        self._take(rows)
        self._heads = [row.head() for row in self._rows]
        self._cells = np.zeros((len(rows), len(order)), np.uint8)
        self._changed = np.full(len(rows), self._version, np.int64)
        for replica in order:
            self._set(replica, self._columns[replica], None)
        self.floor = self._version
        self._gone.clear()

    def _realign(self, rows: Mapping[str, Row]) -> bool:
        """Rows came, went or are others; those that stay keep their cells."""
        before, heads, index = self._rows, self._heads, self._index
        self._take(rows)
        places = [index.get(row.name, -1) for row in self._rows]
        pairs = zip(places, self._rows, strict=True)
        same = [at >= 0 and (before[at] is row or before[at] == row) for at, row in pairs]
        self._heads = [
            heads[at] if kept else row.head() for at, row, kept in zip(places, self._rows, same, strict=True)
        ]
        came_from = np.asarray(places, np.int64)
        cells = np.zeros((len(rows), len(self._order)), np.uint8)
        stayed = came_from >= 0
        cells[stayed] = self._cells[came_from[stayed]]
        changed = np.full(len(rows), self._version, np.int64)
        kept_rows = np.asarray(same, bool)
        changed[kept_rows] = self._changed[came_from[kept_rows]]
        self._cells, self._changed = cells, changed
        left = [row for row in before if row.name not in self._index]
        if len(left) + len(self._gone) > MAX_GONE:
            self._gone.clear()
            self.floor = self._version
        self._gone.extend((self._version, row.namespace, row.name) for row in left)
        if not all(same):
            for replica, column in self._columns.items():
                self._set(replica, column, column)
        return bool(left) or not all(same)

    def _take(self, rows: Mapping[str, Row]) -> None:
        self._rows = [rows[name] for name in sorted(rows)]
        self._index = {row.name: number for number, row in enumerate(self._rows)}
        self._told_only = {name for name in rows if name not in self._registered}
        self._namespaces = {row.namespace for row in self._rows}

    def _set(self, replica: str, column: Column, before: Column | None) -> bool:
        at = self._order.index(replica)
        spaces = self._namespaces - column.namespaces
        new = np.full(len(self._rows), ord(LETTERS[Phase.UNLOADED]), np.uint8)
        if spaces:
            new[[row.namespace in spaces for row in self._rows]] = ord(NOT_SERVED)
        for name, letter in column.cells.items():
            if name in self._index:
                new[self._index[name]] = ord(letter)
        differs = self._cells[:, at] != new
        self._cells[:, at] = new
        told = before.why if before is not None else {}
        for name in {n for n, _ in told.items() ^ column.why.items()} & self._index.keys():
            differs[self._index[name]] = True
        self._changed[differs] = self._version
        return bool(differs.any())
