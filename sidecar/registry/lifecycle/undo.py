"""Take a load back: the name serves what it served before, and the new revision is withdrawn.

A request id identifies a write. A restored pointer gets the request id of the write that it restores. So
callers may take back loads of one name in any order, and two at once. What somebody else relies on stays.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from lora_fs.sidecar.errors import CorruptRecord
from lora_fs.sidecar.model import AdapterKey, Pointer, Record, Scope, State
from lora_fs.sidecar.registry.lifecycle import release
from lora_fs.sidecar.registry.lifecycle.ingest import Registered
from lora_fs.sidecar.registry.store.reader import Body, Series
from lora_fs.sidecar.registry.store.writer import Registry


class Made(BaseModel):
    """The writes of one load, by their request ids."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    revision: str = Field(description="What was loaded")
    pointer: str | None = Field(None, description="Of the pointer; null: the load moved none")
    record: str | None = Field(None, description="Of the record; null: the revision was registered before")

    @classmethod
    def by(cls, done: Registered) -> Made:
        """Return what a registration wrote that claims its pointer."""
        return cls(
            revision=done.record.revision,
            pointer=done.pointer.request_id if done.pointer is not None else None,
            record=done.record.request_id if done.changed else None,
        )


def take_back(registry: Registry, scope: Scope, name: str, made: Made, *, writer: str) -> None:
    """Undo a load. Repeated, it changes nothing more.

    Whoever promoted the revision or loaded it since has written the pointer, and keeps it. From then on the
    record is theirs: they may take it back in turn, at the same time too. So each write is followed by
    another look.

    Args:
        writer: whose load it was. A record whose last writer is another one stays.
    Raises:
        TemporaryError: see ``Registry.append``.
    """
    undo = _Undo(registry, scope, name, made, writer)
    while undo.restore() | undo.withdraw():  # both each time
        pass


@dataclass
class _Undo:
    """One load that its caller takes back.

    ``restored``: the request ids of the pointers that it restored. ``given``: of the pointers on whose
    account it left the record to others. ``gone``: it has withdrawn the record.
    """

    registry: Registry
    scope: Scope
    name: str
    made: Made
    writer: str
    restored: set[str] = field(default_factory=set)
    given: set[str] = field(default_factory=set)
    gone: bool = False

    def __post_init__(self) -> None:
        self.key = AdapterKey.checked(*self.scope, self.made.revision, self.name)

    def restore(self) -> bool:
        """Let the name serve what it served before this load; returns whether to look again."""
        return self.made.pointer is not None and self._append(
            self.registry.pointers(self.scope, self.name), self._earlier
        )

    def withdraw(self) -> bool:
        """Withdraw the record, or give it to whoever relies on it; returns whether to look again."""
        return self._append(self.registry.records(self.key), self._withdrawn)

    def _append(self, series: Series[Body], change: Callable[[Body | None], dict[str, Any] | None]) -> bool:
        if change(self.registry.latest(series)[1]) is None:
            return False
        self.registry.append(series, change, writer=self.writer)
        return True

    def _earlier(self, newest: Pointer | None) -> dict[str, Any] | None:
        """The fields of the pointer after ``newest``; None: that one may stay."""
        if newest is None or newest.request_id not in {self.made.pointer, *self.restored}:
            return None
        stays = self._stays()
        if newest.request_id != self.made.pointer and (newest.revision is None or newest.revision in stays):
            return None
        earlier = _before(self.registry, self.scope, self.name, newest.request_id, stays)
        self.restored.update({earlier.request_id} if earlier is not None else ())
        return _as_before(earlier, stays)

    def _withdrawn(self, newest: Record | None) -> dict[str, Any] | None:
        """The fields of the record after ``newest``; None: that one may stay."""
        if newest is None or not (self._is_own(newest) or (self.gone and not newest.present)):
            return None
        heir = self._heir()
        if heir is None:
            self.gone = True
            return {"state": State.DELETED} if newest.present else None
        if newest.present and newest.request_id == heir.request_id:
            return None
        self.given.add(heir.request_id)
        return {"state": State.PRESENT, "request_id": heir.request_id, "writer": heir.writer}

    def _is_own(self, newest: Record | None) -> bool:
        if newest is None or not newest.present:
            return False
        own = newest.request_id in {self.made.record, self.made.pointer} - {None}
        return (own and newest.writer == self.writer) or newest.request_id in self.given

    def _stays(self) -> Collection[str]:
        """The revisions that stay registered after this load."""
        known = release.present_revisions(self.registry, self.scope, self.name)
        return known.keys() - ({self.made.revision} if self._is_own(known.get(self.made.revision)) else set())

    def _heir(self) -> Pointer | None:
        """The pointer of whoever else relies on the revision."""
        pointer = release.active(self.registry, self.scope, self.name)
        if pointer is None or pointer.request_id == self.made.pointer:
            return None
        tried = pointer.canary.revision if pointer.canary is not None else None
        return pointer if self.made.revision in (pointer.revision, tried) else None


def _before(
    registry: Registry, scope: Scope, name: str, request_id: str, stays: Collection[str]
) -> Pointer | None:
    """Return the newest pointer before a request's first one whose revision is still registered."""
    series, below = registry.pointers(scope, name), list[Pointer]()
    for generation in registry.generations(series):
        with suppress(CorruptRecord):
            pointer = registry.read(series, generation)
            if pointer.request_id == request_id:
                below.clear()
            else:
                below.append(pointer)
    return next((one for one in below if one.revision is None or one.revision in stays), None)


def _as_before(earlier: Pointer | None, stays: Collection[str]) -> dict[str, Any]:
    """The fields of the pointer that restores ``earlier``, less the revisions withdrawn since."""
    if earlier is None or earlier.revision is None:
        nothing: dict[str, Any] = {"revision": None, "previous_revision": None, "canary": None}
        return nothing if earlier is None else nothing | {"request_id": earlier.request_id}
    previous, canary = earlier.previous_revision, earlier.canary
    return {
        "revision": earlier.revision,
        "previous_revision": previous if previous in stays else None,
        "canary": canary.model_dump(mode="json") if canary and canary.revision in stays else None,
        "request_id": earlier.request_id,
    }
