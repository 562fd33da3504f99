"""The desired state in memory: what the volume says, as last read, good as long as it lasts.

A view only learns: a generation replaces a lower one, a tombstone withdraws, and *absence
withdraws nothing*. A file that cannot be read leaves the last good state in force and is
reported. Bodies are read once, since names never change, and a folder whose names are those
of the last scan is passed over. ``refresh`` blocks on the volume and belongs in a thread;
``desired`` is an immutable snapshot that any thread may read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from lora_fs.sidecar.errors import CorruptRecord, VolumeUnavailable
from lora_fs.sidecar.model import AdapterKey, Pointer, Record, Scope
from lora_fs.sidecar.registry import root
from lora_fs.sidecar.registry.layout import Generation, Listing, generation_name
from lora_fs.sidecar.registry.reading import ScopeListing, Series
from lora_fs.sidecar.registry.store import Registry

RETRY_S = 0.1  # at first; doubled up to RETRY_MOST_S while the same files cannot be read
RETRY_MOST_S = 30.0
LAG_LOOK_S = 1.0  # at first; doubled up to LAG_LOOK_MOST_S while a listing may lag behind HEAD
LAG_LOOK_MOST_S = 5.0

Body = TypeVar("Body", Record, Pointer)
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Desired:
    """What the volume said, at one moment.

    Attributes:
        records: the newest good record of every revision, tombstones included.
        pointers: the newest good pointer of every name.
        problems: files that cannot be read, and why; the state before them is in force. Also
            generations that two writers published at once, on volumes without link().
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
    """Keeps ``desired`` for some scopes of one registry.

    Args:
        scan_s: the tree is listed so often whatever HEAD says.
        lag_s: how long a listing may lack what HEAD announced; for so long after HEAD moved the
            tree is listed again and again. 0 where listings are fresh.
    """

    def __init__(
        self,
        registry: Registry,
        scopes: tuple[Scope, ...],
        *,
        scan_s: float = 300.0,
        lag_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry = registry
        self._scopes = scopes
        self._scan_s, self._lag = scan_s, _Lag(lag_s)
        self._clock = clock
        self._head: bytes | None = None
        self._scanned_at: float | None = None
        self._retry_at, self._retry_s = 0.0, RETRY_S
        self._epoch = registry.marker.epoch
        self._unread: dict[Path, set[str]] = {}  # names in a folder whose newest body is not held
        self.desired = Desired()

    def refresh(self, *, force: bool = False) -> bool:
        """Look at HEAD, and at the tree if HEAD changed or a scan is due; True if anything is new.

        Raises:
            VolumeUnavailable, RegistryLost: ``desired`` stays as it was.
        """
        self._registry.sweep()
        head = root.read_head(self._registry.layout.root)
        now = self._clock()
        due = self._scanned_at is None or now - self._scanned_at >= self._scan_s
        due |= bool(self._unread) and now >= self._retry_at
        if head != self._head:
            self._lag.begin(now)
        look = force or due or head != self._head or self._lag.due(now)
        if look or head is None:
            self._registry.check_identity()
        if not look:
            return False
        changed = self._scan()
        self._head, self._scanned_at = head, now
        self._lag.looked(now)
        self._retry_s = RETRY_S if changed else min(2 * self._retry_s, RETRY_MOST_S)
        self._retry_at = now + self._retry_s
        return changed

    def _scan(self) -> bool:
        before, epoch = self.desired, self._registry.marker.epoch
        restored = epoch != self._epoch
        learning = _Learning(self._registry, Desired() if restored else before, self._unread)
        unlisted: dict[Path, VolumeUnavailable] = {}
        listings = {
            scope: self._registry.scan(scope, learning.before.listings.get(scope), unlisted)
            for scope in self._scopes
        }
        if self._scanned_at is None or restored:
            learning.refuse(unlisted.values())
        for scope, listing in listings.items():
            learning.scope(scope, listing)
        if self._scanned_at is None or restored:
            learning.refuse(learning.failures)
        problems = learning.problems | {str(path): str(error) for path, error in unlisted.items()}
        same_names = all(listings[scope] == before.listings.get(scope) for scope in self._scopes)
        frozen = before.frozen
        if restored or not same_names:
            frozen = None if restored else _vanished(learning.records, listings)
        same = not (restored or learning.learned) and (problems, frozen) == (before.problems, before.frozen)
        version = before.version if same else before.version + 1
        self._epoch, self._unread = epoch, learning.unread
        for path in unlisted:
            self._unread.setdefault(path, set())
        self.desired = Desired(version, learning.records, learning.pointers, listings, problems, frozen)
        return not same


class _Lag:
    """When to list once more after HEAD moved: FUSE and NFS clients keep listings for up to a minute."""

    def __init__(self, lag_s: float) -> None:
        self._lag_s = lag_s
        self._end = self._pause_s = 0.0
        self._next: float | None = None

    def begin(self, now: float) -> None:
        self._next, self._end, self._pause_s = now, now + self._lag_s, LAG_LOOK_S

    def due(self, now: float) -> bool:
        return self._next is not None and now >= self._next

    def looked(self, now: float) -> None:
        if self.due(now):
            self._next = min(now + self._pause_s, self._end) if now < self._end else None
            self._pause_s = min(2 * self._pause_s, LAG_LOOK_MOST_S)


class _Learning:
    """One scan: what was known before, and what is read on top of it."""

    def __init__(self, registry: Registry, before: Desired, unread: Mapping[Path, set[str]]) -> None:
        self._registry, self._unread_before = registry, unread
        self.before = before
        self.records, self.pointers = dict(before.records), dict(before.pointers)
        self.problems: dict[str, str] = {}
        self.unread: dict[Path, set[str]] = {}
        self.failures: list[VolumeUnavailable] = []
        self.learned = False

    def refuse(self, failures: Iterable[VolumeUnavailable]) -> None:
        """Raise what keeps the first state from being known. No permission is a lasting answer."""
        for error in failures:
            if not isinstance(error.__cause__, PermissionError):
                raise error

    def scope(self, scope: Scope, listing: ScopeListing) -> None:
        """Read what is new in a scope."""
        last, layout = self.before.listings.get(scope, ScopeListing()), self._registry.layout
        for revision, entries in listing.revisions.items():
            folder = layout.revision(scope, revision)
            for name in self._news(folder, entries, last.revisions.get(revision)):
                key = AdapterKey(*scope, revision, name)
                self._learn(self.records, key, self._registry.records(key), entries)
        for name in self._news(layout.active(scope), listing.active, last.active):
            series = self._registry.pointers(scope, name)
            self._learn(self.pointers, (scope, name), series, listing.active)

    def _news(self, folder: Path, listing: Listing, last: Listing | None) -> list[str]:
        for name, count in listing.siblings.items():
            newest = folder / generation_name(name, *listing.records[name])
            self.problems[f"{newest}: siblings"] = (
                f"Conflict: {count} writers published the same generation of {name}; {newest.name} is in "
                "force, and the next write settles it"
            )
        unread = self._unread_before.get(folder, set())
        if last is listing:
            return [name for name in unread if name in listing.records]
        held = last.records if last is not None else {}
        return [name for name, found in listing.records.items() if held.get(name) != found or name in unread]

    def _learn(self, known: dict[Key, Body], key: Key, series: Series[Body], listing: Listing) -> None:
        generation, held = listing.records[series.name], known.get(key)
        if held is not None and _generation(held, generation) >= generation:
            return
        try:
            known[key] = self._registry.read(series, generation)
            self.learned = True
            return
        except CorruptRecord as error:
            why, good = str(error), self._last_good(series)
        except VolumeUnavailable as error:
            why, good = str(error), None
            self.failures.append(error)
        self.problems[str(series.folder / generation_name(series.name, *generation))] = why
        self.unread.setdefault(series.folder, set()).add(series.name)
        if good is None or (held is not None and held.generation >= good.generation):
            return
        known[key] = good
        self.learned = True

    def _last_good(self, series: Series[Body]) -> Body | None:
        try:
            return self._registry.latest(series)[1]
        except VolumeUnavailable as error:
            self.failures.append(error)
            return None


def _generation(body: Record | Pointer, listed: Generation) -> Generation:
    """A body's own generation, to be compared with a listed one: with a token where names have it."""
    return Generation(body.generation, body.token if listed.token else "")


def _vanished(records: Mapping[AdapterKey, Record], listings: Mapping[Scope, ScopeListing]) -> str | None:
    missing = 0
    for key in records:
        entries = listings[key.scope].revisions.get(key.revision)
        missing += entries is None or key.name not in entries.records
    if missing > max(5, len(records) // 5):
        return (
            f"{missing} of {len(records)} records vanished from the volume at once; "
            "nothing is unloaded for it: is the right volume mounted?"
        )
    return None
