"""Take a load back: the name serves what it served before, and the new revision is withdrawn.

Loads of one name may overlap, and callers take them back in any order, two at once or in two processes. So
the volume says which loads are undone. An undo first writes a pointer that names the load's own pointer as
*undone*, and only then looks at the record. From that write on no other undo restores the load's pointer, or
leaves the record to it. A revision that a load registered stays while a pointer of somebody else names it
that is not undone: the record then passes to that one, whose own undo may withdraw it.

A request id identifies a write. A restored pointer gets the request id of the write that it restores.

An undo that is killed is completed by its repeat. What a killed load wrote stays registered: a repeat of the
load serves it. A revision also stays while a pointer that may name it cannot be read, as a cut one where
there are no hard links.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from lora_fs.sidecar.errors import CorruptRecord
from lora_fs.sidecar.model import AdapterKey, Pointer, Record, Scope, State
from lora_fs.sidecar.registry.format.layout import Generation
from lora_fs.sidecar.registry.lifecycle import release
from lora_fs.sidecar.registry.store.reader import Body, Series
from lora_fs.sidecar.registry.store.writer import Registry


class Made(BaseModel):
    """The writes of one load, by their request ids."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    revision: str = Field(description="What was loaded")
    pointer: str | None = Field(None, description="Of the pointer; null: the load moved none")
    record: str | None = Field(None, description="Of the record; null: the revision was registered before")

    @classmethod
    def by(cls, record: Record, pointer: Pointer | None, *, changed: bool) -> Made:
        """Return the writes of a load. ``changed``: it wrote the record."""
        moved = pointer.request_id if pointer is not None else None
        return cls(revision=record.revision, pointer=moved, record=record.request_id if changed else None)


def take_back(registry: Registry, scope: Scope, name: str, made: Made, *, writer: str) -> None:
    """Undo a load. Repeated, it changes nothing more.

    Others may load and undo at the same time, so each write is followed by another look.

    Args:
        writer: whose load it was. A record whose last writer is another one stays.
    Raises:
        TemporaryError: see ``Registry.append``.
    """
    undo = _Undo(registry, scope, name, made, writer)
    while undo.restore() | undo.withdraw():  # both each time
        pass


class _History(NamedTuple):
    """The pointers of a name, the newest first.

    ``undone``: the request ids that undos named. ``whole``: False if one of them is damaged.
    """

    pointers: tuple[Pointer, ...]
    undone: frozenset[str]
    whole: bool

    @property
    def standing(self) -> list[Pointer]:
        return [one for one in self.pointers if one.request_id not in self.undone]


@dataclass
class _Undo:
    """One load that its caller takes back.

    ``restored``: the request ids of the pointers that it restored. ``given``: of the pointers to which it
    left the record. ``gone``: it has withdrawn the record.
    """

    registry: Registry
    scope: Scope
    name: str
    made: Made
    writer: str
    restored: set[str] = field(default_factory=set)
    given: set[str] = field(default_factory=set)
    gone: bool = False
    read: dict[Generation, Pointer] = field(default_factory=dict)

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
        """The fields of the pointer after ``newest``; None: that one may stay, and says what it has to."""
        if newest is None:
            return None
        before = self._history()
        own = frozenset(one.request_id for one in before.pointers if one.request_id == self.made.pointer)
        after = before._replace(undone=before.undone | own)
        present = release.present_revisions(self.registry, self.scope, self.name)
        lost = newest.request_id in self.restored and newest.revision not in (None, *present)
        if newest.request_id in after.undone or lost:
            fits = (one for one in after.standing if one.revision is None or one.revision in present)
            earlier = next(fits, None)
            self.restored.update({earlier.request_id} if earlier is not None else ())
            return _as_before(earlier, present) | {"undone": self.made.pointer}
        if after.undone == before.undone:
            return None
        return _same_write(newest) | {"undone": self.made.pointer}

    def _withdrawn(self, newest: Record | None) -> dict[str, Any] | None:
        """The fields of the record after ``newest``; None: that one may stay."""
        if newest is None:
            return None
        history = self._history()
        if not (self._is_own(newest, history) if newest.present else self.gone):
            return None
        heir = next((one for one in history.standing if self._is_named_by(one)), None)
        if heir is None and not history.whole:
            return None  # the damaged one may name it
        if heir is None:
            self.gone = True
            return {"state": State.DELETED} if newest.present else None
        self.given.add(heir.request_id)
        return {"state": State.PRESENT} | _same_write(heir)

    def _is_own(self, newest: Record, history: _History) -> bool:
        """Whether this load wrote the record last, or it was left to a load that is undone, too."""
        own = newest.writer == self.writer
        if newest.request_id in history.undone:
            return own or newest.request_id in self.given
        return own and newest.request_id == self.made.record

    def _is_named_by(self, pointer: Pointer) -> bool:
        tried = pointer.canary.revision if pointer.canary is not None else None
        return self.made.revision in (pointer.revision, tried)

    def _history(self) -> _History:
        """Read the name's pointers; each one once, since none of them ever changes."""
        series, whole = self.registry.pointers(self.scope, self.name), True
        listed = self.registry.generations(series)
        for generation in listed:
            if generation not in self.read:
                try:
                    self.read[generation] = self.registry.read(series, generation)
                except CorruptRecord:
                    whole &= self.registry.is_gone(series.file(generation))
        pointers = tuple(self.read[one] for one in listed if one in self.read)
        return _History(pointers, frozenset(one.undone for one in pointers if one.undone), whole)


def _same_write(pointer: Pointer) -> dict[str, Any]:
    """The fields by which a generation counts as the same write as ``pointer``."""
    return {"request_id": pointer.request_id, "writer": pointer.writer}


def _as_before(earlier: Pointer | None, present: Collection[str]) -> dict[str, Any]:
    """The fields of the pointer that restores ``earlier``, less the revisions withdrawn since."""
    if earlier is None or earlier.revision is None:
        nothing: dict[str, Any] = {"revision": None, "previous_revision": None, "canary": None}
        return nothing if earlier is None else nothing | _same_write(earlier)
    previous, canary = earlier.previous_revision, earlier.canary
    return {
        "revision": earlier.revision,
        "previous_revision": previous if previous in present else None,
        "canary": canary.model_dump(mode="json") if canary and canary.revision in present else None,
        **_same_write(earlier),
    }
