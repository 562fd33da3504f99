"""The desired state in memory: what the volume says, as last read, good as long as it lasts.

A view only learns: a generation replaces a lower one, a tombstone withdraws, and *absence
withdraws nothing*. A file that cannot be read leaves the last good state in force and is
reported. Bodies are read once, since names never change. ``refresh`` blocks on the volume
and belongs in a thread; ``desired`` is an immutable snapshot that any thread may read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from lora_fs.sidecar.errors import CorruptRecord
from lora_fs.sidecar.model import AdapterKey, Pointer, Record, Scope
from lora_fs.sidecar.registry import root
from lora_fs.sidecar.registry.layout import Generation
from lora_fs.sidecar.registry.store import Registry, ScopeListing, Series

Body = TypeVar("Body", Record, Pointer)
Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class Desired:
    """What the volume said, at one moment.

    Attributes:
        records: the newest good record of every revision, tombstones included.
        pointers: the newest good pointer of every name.
        problems: files that cannot be read, and why; the state before them is in force.
        frozen: why absence is not believed, or None.
    """

    version: int = 0
    records: Mapping[AdapterKey, Record] = field(default_factory=dict)
    pointers: Mapping[tuple[Scope, str], Pointer] = field(default_factory=dict)
    listings: Mapping[Scope, ScopeListing] = field(default_factory=dict)
    problems: Mapping[str, str] = field(default_factory=dict)
    frozen: str | None = None

    def active(self) -> Iterator[tuple[Scope, str, Record]]:
        """Every plain name that serves, with the record it serves."""
        for (scope, name), pointer in self.pointers.items():
            if pointer.revision is not None:
                record = self.records.get(AdapterKey(*scope, pointer.revision, name))
                if record is not None and record.present:
                    yield scope, name, record


class RegistryView:
    """Keeps ``desired`` for some scopes of one registry."""

    def __init__(
        self,
        registry: Registry,
        scopes: tuple[Scope, ...],
        *,
        scan_s: float = 300.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry = registry
        self._scopes = scopes
        self._scan_s = scan_s
        self._clock = clock
        self._head: bytes | None = None
        self._scanned_at: float | None = None
        self._epoch = registry.marker.epoch
        self.desired = Desired()

    def refresh(self, *, force: bool = False) -> bool:
        """Look at HEAD, and at the tree if HEAD changed or a scan is due; True if anything is new.

        Raises:
            VolumeUnavailable, RegistryLost: ``desired`` stays as it was.
        """
        head = root.read_head(self._registry.layout.root)
        now = self._clock()
        due = self._scanned_at is None or now - self._scanned_at >= self._scan_s
        if head is None or due or force:
            self._registry.check_identity()
        if not (force or due or head != self._head or self.desired.problems):
            return False
        changed = self._scan()
        self._head, self._scanned_at = head, now
        return changed

    def _scan(self) -> bool:
        before = self.desired
        restored = self._registry.marker.epoch != self._epoch
        records = {} if restored else dict(before.records)
        pointers = {} if restored else dict(before.pointers)
        problems: dict[str, str] = {}
        listings = {scope: self._registry.scan(scope) for scope in self._scopes}
        listed: set[AdapterKey] = set()
        for scope, listing in listings.items():
            for revision, entries in listing.revisions.items():
                for name, generation in entries.records.items():
                    key = AdapterKey(*scope, revision, name)
                    listed.add(key)
                    if self._is_news(records.get(key), generation):
                        self._learn(records, key, self._registry.records(key), generation, problems)
            for name, generation in listing.pointers.items():
                if self._is_news(pointers.get((scope, name)), generation):
                    pointer_series = self._registry.pointers(scope, name)
                    self._learn(pointers, (scope, name), pointer_series, generation, problems)
        frozen = None if restored else self._vanished(records.keys() - listed, len(records))
        self._epoch = self._registry.marker.epoch
        same = (records, pointers, problems, frozen) == (
            before.records,
            before.pointers,
            before.problems,
            before.frozen,
        )
        version = before.version if same else before.version + 1
        self.desired = Desired(version, records, pointers, listings, problems, frozen)
        return not same

    def _learn(
        self,
        known: dict[Key, Body],
        key: Key,
        series: Series[Body],
        generation: Generation,
        problems: dict[str, str],
    ) -> None:
        try:
            known[key] = self._registry.read(series, generation)
        except CorruptRecord as error:
            problems[f"{series.folder.name}/{series.name}"] = str(error)
            if key not in known:
                _, last_good = self._registry.latest(series)
                if last_good is not None:
                    known[key] = last_good

    def _is_news(self, held: Record | Pointer | None, listed: Generation) -> bool:
        if held is None:
            return True
        tie = held.token if self._registry.marker.tier == "lww" else ""
        return (held.generation, tie) < listed

    def _vanished(self, missing: set[AdapterKey], known: int) -> str | None:
        if len(missing) > max(5, known // 5):
            return (
                f"{len(missing)} of {known} records vanished from the volume at once; "
                "nothing is unloaded for it: is the right volume mounted?"
            )
        return None
