"""What is known and not listed: too much of it at once is a lost volume; a tombstone of it is forgotten."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from lora_fs.sidecar.model import AdapterKey, Scope
from lora_fs.sidecar.registry.store.reader import ScopeListing
from lora_fs.sidecar.registry.view.learning import Learning

Known = AdapterKey | tuple[Scope, str]  # of a record, of a pointer


class Missing:
    """Present records and pointers that serve, known and not listed, by scope."""

    def __init__(self) -> None:
        self._records: dict[Scope, set[AdapterKey]] = {}
        self._pointers: dict[Scope, set[tuple[Scope, str]]] = {}
        self._known: dict[Scope, tuple[int, int]] = {}  # how many there are, listed or not

    def all(self) -> set[Known]:
        return set().union(*self._records.values(), *self._pointers.values())

    def look(
        self,
        scope: Scope,
        learning: Learning,
        listings: Mapping[Scope, ScopeListing],
        told: Collection[Known],
    ) -> None:
        """What a scope's listing lacks of what is known there, but for what HEAD told of.

        A tombstone among it is forgotten: gc removed it.
        """
        records, pointers = learning.records.part(scope), learning.pointers.part(scope)
        gone = [key for key in records if key not in told and not is_listed(key, listings)]
        names = [key for key in pointers if key not in told and not is_listed(key, listings)]
        self._records[scope] = {key for key in gone if records[key].present}
        self._pointers[scope] = {key for key in names if pointers[key].revision is not None}
        learning.forget(set(gone) - self._records[scope], set(names) - self._pointers[scope])
        self._known[scope] = len(learning.records.part(scope)), len(learning.pointers.part(scope))

    def vanished(self) -> str | None:
        """Which of them went at once, and what to do, where it is too many of those known; or None."""
        gone = _too_many("records", self._records.values(), sum(one for one, _ in self._known.values()))
        names = _too_many("pointers", self._pointers.values(), sum(one for _, one in self._known.values()))
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


def _too_many(what: str, missing: Iterable[Collection[Known]], known: int) -> str:
    """``6 of 7 records``; empty if that is no more than may go without a word."""
    count = sum(map(len, missing))
    return f"{count} of {known} {what}" if count > max(5, known // 5) else ""


def is_listed(key: Known, listings: Mapping[Scope, ScopeListing]) -> bool:
    if not isinstance(key, AdapterKey):
        scope, name = key
        return name in listings[scope].pointers
    entries = listings[key.scope].revisions.get(key.revision)
    return entries is not None and key.name in entries.records
