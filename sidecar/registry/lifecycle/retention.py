"""Which of a name's revisions stay registered, and withdrawing the others.

The newest stay, as many as the name or else its namespace says. So do those that the name serves, served
before or tries, pinned ones, those that a folder registered or a replica reports, and recent ones. Their
order is the time of their first registration, by their writers' clocks. One of unknown time stays. gc
removes the files later, as those of any withdrawn revision.
"""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lora_fs.sidecar.model import AdapterKey, Pointer, Record, Scope, State
from lora_fs.sidecar.registry.format.ids import natural_order, written_at
from lora_fs.sidecar.registry.lifecycle.release import active, present_revisions
from lora_fs.sidecar.registry.store.writer import Registry


@dataclass(frozen=True, slots=True)
class Revision:
    """A registered revision. ``at``: when its first generation was written, None if unknown."""

    name: str
    at: datetime.datetime | None
    protected: bool = False


def beyond(revisions: Sequence[Revision], keep: int) -> list[str]:
    """The revisions that are too many, the newest ``keep`` and the protected ones left out. Pure."""
    told = [(one.at, natural_order(one.name), one) for one in revisions if one.at is not None]
    newest_first = [one for _, _, one in sorted(told, key=lambda one: one[:2], reverse=True)]
    spared = max(0, keep - (len(revisions) - len(told)))  # those of unknown age count as the newest
    return [one.name for one in newest_first[spared:] if not one.protected]


def expired(registry: Registry, scope: Scope, in_use: Collection[AdapterKey]) -> Iterator[tuple[Record, int]]:
    """Return the records that may be withdrawn, each with how many revisions its name keeps.

    Raises:
        OperatorError: the namespace's setting is damaged, so the number is unknown.
        VolumeUnavailable: the volume does not read something.
    """
    quota = registry.accounts.quota(scope.namespace)
    of_namespace = quota.keep_revisions if quota is not None else None
    listings = registry.scan(scope).revisions.values()
    counts = Counter(name for entries in listings for name in entries.records)
    for name, count in sorted(counts.items()):
        if count == 1:
            continue
        top, pointer = registry.latest(registry.pointers(scope, name))
        keep = (pointer.keep_revisions if pointer is not None else None) or of_namespace
        is_unread = top.generation > (pointer.generation if pointer is not None else 0)
        if keep is None or count <= keep or is_unread:  # what an unreadable pointer names is unknown
            continue
        known = present_revisions(registry, scope, name)
        spared = serving(pointer)
        revisions = [
            Revision(
                revision,
                written_at(record.registered_at or record.updated_at),
                _is_kept(record, spared, in_use),
            )
            for revision, record in known.items()
        ]
        for revision in beyond(revisions, keep):
            yield known[revision], keep


def withdraw(registry: Registry, record: Record, *, writer: str) -> None:
    """Unregister a revision that is too many, unless somebody wants it meanwhile."""
    key = record.key

    def bury(newest: Record | None) -> dict[str, Any] | None:
        moved_on = newest is None or newest.sum != record.sum or _is_served(registry, key)
        return None if moved_on else {"state": State.DELETED}

    newest = registry.append(registry.records(key), bury, writer=writer, announce=False)
    is_buried = not newest.present and newest.writer == writer  # another's tombstone stays
    if is_buried and _is_served(registry, key):  # promoted between the look and the write
        registry.append(registry.records(key), lambda _: {"state": State.PRESENT}, writer=writer)
    registry.announce()


def _is_served(registry: Registry, key: AdapterKey) -> bool:
    return key.revision in serving(active(registry, key.scope, key.name))


def serving(pointer: Pointer | None) -> frozenset[str]:
    """The revisions that a name serves, served before, and has as its canary."""
    if pointer is None:
        return frozenset()
    tried = pointer.canary.revision if pointer.canary is not None else None
    return frozenset(one for one in (pointer.revision, pointer.previous_revision, tried) if one is not None)


def _is_kept(record: Record, spared: frozenset[str], in_use: Collection[AdapterKey]) -> bool:
    return (
        record.spec.is_pinned
        or record.revision in spared
        or record.origin == "folder"
        or record.key in in_use
    )
