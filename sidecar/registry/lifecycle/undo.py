"""Take a load back: the name serves what it served before, and what is new is withdrawn.

A write is known by its request id. A restored pointer gets the request id of the write that it restores. So
loads of one name may be taken back in any order. What somebody else relies on stays.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from lora_fs.sidecar.errors import CorruptRecord
from lora_fs.sidecar.model import AdapterKey, Pointer, Record, Scope, State
from lora_fs.sidecar.registry.lifecycle import release
from lora_fs.sidecar.registry.lifecycle.ingest import Registered
from lora_fs.sidecar.registry.store.writer import Registry


class Made(BaseModel):
    """What one load wrote, by the request ids of its writes."""

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

    Whoever promoted the revision or loaded it since has written the pointer, and keeps it. A record that they
    rely on is theirs from then on: they may take it back in turn.

    Args:
        writer: whose load it was. A record that another one wrote last is not withdrawn.
    Raises:
        TemporaryError: see ``Registry.append``.
    """
    key = AdapterKey.checked(*scope, made.revision, name)
    records, pointers = registry.records(key), registry.pointers(scope, name)
    own = {one for one in (made.record, made.pointer) if one is not None}

    def is_own(newest: Record | None) -> bool:
        return newest is not None and newest.present and newest.request_id in own and newest.writer == writer

    withdraws = is_own(registry.latest(records)[1])
    known = release.present_revisions(registry, scope, name)
    stays = known.keys() - ({made.revision} if withdraws else set())

    def restored(newest: Pointer | None) -> dict[str, Any] | None:
        if newest is None or newest.request_id != made.pointer:
            return None
        return _as_before(_before(registry, scope, name, newest.request_id, stays), stays)

    def heir() -> Pointer | None:
        """The pointer of whoever relies on the revision."""
        pointer = release.active(registry, scope, name)
        tried = pointer.canary.revision if pointer is not None and pointer.canary is not None else None
        return pointer if pointer is not None and made.revision in (pointer.revision, tried) else None

    def withdrawn(newest: Record | None) -> dict[str, Any] | None:
        if not is_own(newest):
            return None
        if (by := heir()) is not None:
            return {"request_id": by.request_id, "writer": by.writer}
        return {"state": State.DELETED}

    if made.pointer is not None:
        registry.append(pointers, restored, writer=writer)
    if withdraws:
        gone = registry.append(records, withdrawn, writer=writer)
        if not gone.present and (by := heir()) is not None:  # since the check: its answer was "registered"
            theirs = {"state": State.PRESENT, "request_id": by.request_id, "writer": by.writer}
            registry.append(records, lambda _: theirs, writer=writer)


def _before(
    registry: Registry, scope: Scope, name: str, request_id: str, stays: Collection[str]
) -> Pointer | None:
    """Return the pointer before the first one of a request: the newest whose revision is registered still."""
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
    """The fields of the pointer that restores ``earlier``: what was withdrawn since is left out."""
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
