"""Known bodies that a listing lacks: too many at once mean a lost volume; tombstones are forgotten."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from lora_fs.sidecar.model import AdapterKey, Scope
from lora_fs.sidecar.registry.store.reader import Known, ScopeListing
from lora_fs.sidecar.registry.view.learning import Learning, serves


def find_missing(
    scope: Scope, learning: Learning, listings: Mapping[Scope, ScopeListing], told: Collection[Known]
) -> set[Known]:
    """Return the bodies in force that a scope's listing lacks, except those that HEAD announced.

    Forgets a tombstone among them: gc removed it.
    """
    known: Iterator[tuple[Known, Any]] = chain(
        learning.records.part(scope).items(), learning.pointers.part(scope).items()
    )
    gone = {key: body for key, body in known if key not in told and not is_listed(key, listings)}
    missing = {key for key, body in gone.items() if serves(body)}
    for tombstone in gone.keys() - missing:
        learning.mapping_of(tombstone).drop(tombstone)
    return missing


def vanished(missing: Iterable[Known], records: int, pointers: int) -> str | None:
    """Which went at once, and what to do, where it is too many of so many known; or None."""
    are_records = [isinstance(key, AdapterKey) for key in missing]
    gone = _too_many("records", are_records.count(True), records)
    names = _too_many("pointers", are_records.count(False), pointers)
    if not gone and not names:
        return None
    both = " and ".join(filter(None, (gone, names)))
    told = f"{both} vanished from the volume at once; nothing is unloaded for it"
    if gone:
        return f"{told}: is the right volume mounted?"
    return (
        f"{told}, and a replica that starts serves none of these names: restore .active/ from a backup, "
        "or `lora-fs promote` each"
    )


def _too_many(what: str, count: int, known: int) -> str:
    """``6 of 7 records``; empty if that is no more than may go without a word."""
    return f"{count} of {known} {what}" if count > max(5, known // 5) else ""


def is_listed(key: Known, listings: Mapping[Scope, ScopeListing]) -> bool:
    if not isinstance(key, AdapterKey):
        scope, name = key
        return name in listings[scope].pointers
    return key.name in listings[key.scope].of(key.revision).records
