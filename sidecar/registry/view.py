"""The desired state in memory: what the volume says, as last read, good as long as it lasts.

A view only learns: a generation replaces a lower one or one that is gone, a tombstone withdraws, and
*absence withdraws nothing*. A file that cannot be read leaves the last good state in force and is
reported. Bodies are read once, since names never change. Where HEAD tells what was written those
files alone are read; else the tree is listed, and a folder whose names are those of the last scan
is passed over. ``refresh`` blocks on the volume and belongs in a thread; ``desired`` is an
immutable snapshot that any thread may read.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path

from lora_fs.sidecar.errors import VolumeUnavailable
from lora_fs.sidecar.model import AdapterKey, Record, Scope
from lora_fs.sidecar.registry.desired import Desired, Growing, no_pointers, no_records
from lora_fs.sidecar.registry.head import Head, parse_head, read_head
from lora_fs.sidecar.registry.layout import Place, parse_place
from lora_fs.sidecar.registry.learning import Learning
from lora_fs.sidecar.registry.reading import ScopeListing
from lora_fs.sidecar.registry.store import Registry

__all__ = ["Desired", "RegistryView"]

RETRY_S = 0.1  # at first; doubled up to RETRY_MOST_S while the same files cannot be read
RETRY_MOST_S = 30.0
LAG_LOOK_S = 1.0  # at first; doubled up to LAG_LOOK_MOST_S while a listing may lag behind HEAD
LAG_LOOK_MOST_S = 5.0

_Listings = Mapping[Scope, ScopeListing]


class RegistryView:
    """Keeps ``desired`` for some scopes of one registry.

    Args:
        scan_s: the tree is listed so often whatever HEAD says.
        lag_s: how long a listing may lack what HEAD announced; for so long after HEAD moved the
            tree is listed again and again. 0 where listings are fresh.
        readers: threads that read bodies when many are new; more than one where each waits.
    """

    def __init__(
        self,
        registry: Registry,
        scopes: tuple[Scope, ...],
        *,
        scan_s: float = 300.0,
        lag_s: float = 0.0,
        readers: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry = registry
        self._scopes = scopes
        self._scan_s, self._lag_s, self._lag = scan_s, lag_s, _Lag(lag_s)
        self._readers = readers
        self._clock = clock
        self._head: bytes | None = None
        self._nonce = ""  # of the last HEAD whose writes are known
        self._scanned_at: float | None = None
        self._retry_at, self._retry_s = 0.0, RETRY_S
        self._epoch = registry.marker.epoch
        self._records, self._pointers = no_records(), no_pointers()
        self._unread: Mapping[Path, set[str]] = {}  # names in a folder whose newest body is not held
        self._told: dict[AdapterKey, float] = {}  # what HEAD told of, until when a listing may lack it
        self._missing: dict[Scope, set[AdapterKey]] = {}  # records known and not listed
        self.desired = Desired()

    def refresh(self, *, force: bool = False, folders: Collection[Path] = ()) -> bool:
        """Look at HEAD, and at what it tells of; True if anything is new.

        Args:
            force: list the tree. It is listed without being asked, too: if a scan is due, or if HEAD
                changed and does not tell all that was written.
            folders: revisions, or scopes, to be listed at least.
        Raises:
            VolumeUnavailable, RegistryLost: ``desired`` stays as it was.
        """
        self._registry.sweep()
        head = read_head(self._registry.layout.root)
        now = self._clock()
        due = force or self._scanned_at is None or now - self._scanned_at >= self._scan_s
        due |= bool(self._unread) and now >= self._retry_at
        due |= bool(folders) and bool(self.desired.problems)  # a part of the tree cannot say if they last
        moved = head != self._head
        at = parse_head(head) if moved else None
        told = self._told_of(at) if moved else []
        if told is None or told or due or folders or head is None or self._lag.due(now):
            self._registry.check_identity()
        changed = self._learn_told(told) if told is not None else None
        if changed is None:
            self._lag.begin(now)
            due, changed = True, False
        if due or self._lag.due(now):
            changed |= self._scan(dict.fromkeys(self._scopes))
            self._scanned_at = now
            self._lag.looked(now)
            self._retry_s = RETRY_S if changed else min(2 * self._retry_s, RETRY_MOST_S)
            self._retry_at = now + self._retry_s
        elif folders:
            changed |= self._scan(self._with_folders(folders))
        if moved:
            self._head, self._nonce = head, at.nonce if at is not None else ""
        return changed

    def _with_folders(self, folders: Collection[Path]) -> dict[Scope, Collection[Path] | None]:
        """The scopes to be listed for ``folders``, and which of these: None is the whole scope."""
        found: dict[Scope, Collection[Path] | None] = {}
        for scope in self._scopes:
            home = self._registry.layout.scope(scope)
            if any(home.is_relative_to(folder) for folder in folders):
                found[scope] = None
            elif inside := {folder for folder in folders if folder.is_relative_to(home)}:
                found[scope] = inside
        return found

    def _told_of(self, head: Head | None) -> list[Place] | None:
        """What HEAD says was written in these scopes since the last look; None if it does not say."""
        files = head.since(self._nonce) if head is not None and self._nonce else None
        if head is None or files is None or head.epoch != self._epoch:
            return None
        places = [parse_place(file) for file in files]
        if None in places:
            return None
        return [place for place in places if place is not None and place.scope in self._scopes]

    def _learn_told(self, places: list[Place]) -> bool | None:
        """Read what HEAD told of; None if the tree has to be listed for it."""
        if self._registry.marker.epoch != self._epoch:
            return None
        learning, records = self._learning(), set()
        for place in places:
            if self._is_problem(place) or not learning.told(place):
                return None
            if place.revision is not None:
                records.add(AdapterKey(*place.scope, place.revision, place.name))
        if self._lag_s:
            self._told |= dict.fromkeys(records, self._clock() + self._lag_s)
        if learning.learned:
            before = self.desired
            self._keep(learning, before.listings, before.problems, before.frozen)
        return learning.learned

    def _is_problem(self, place: Place) -> bool:
        """Whether something is told of its series already, which a listing has to take back."""
        scope, revision, name, _ = place
        layout = self._registry.layout
        folder = layout.active(scope) if revision is None else layout.revision(scope, revision)
        return any(text.startswith(f"{folder}/{name}.@") for text in self.desired.problems)

    def _learning(self, *, anew: bool = False) -> Learning:
        """On top of what is known; or, after a restore, on top of nothing."""
        records, pointers = (no_records(), no_pointers()) if anew else (self._records, self._pointers)
        known = (Growing(records), Growing(pointers))
        gone = set().union(*self._missing.values())
        return Learning(self._registry, self._readers, known, {} if anew else self._unread, gone)

    def _scan(self, scopes: dict[Scope, Collection[Path] | None]) -> bool:
        before, epoch = self.desired, self._registry.marker.epoch
        restored = epoch != self._epoch
        if restored:
            scopes = dict.fromkeys(self._scopes)
        learning = self._learning(anew=restored)
        known: Mapping[Scope, ScopeListing] = {} if restored else before.listings
        unlisted: dict[Path, VolumeUnavailable] = {}
        listings = {
            scope: self._registry.scan(scope, known.get(scope), unlisted, folders)
            for scope, folders in scopes.items()
        }
        if self._scanned_at is None or restored:
            learning.refuse(unlisted.values())
        with nullcontext() if self._scanned_at is not None else _collector_paused():
            for scope, listing in listings.items():
                learning.scope(scope, listing, known.get(scope, ScopeListing()))
        if self._scanned_at is None or restored:
            learning.refuse(learning.failures)
        problems = learning.problems | {str(path): str(error) for path, error in unlisted.items()}
        for path in unlisted:
            learning.unread.setdefault(path, set())
        if restored:
            self._told, self._missing = {}, {}
        other_names = {scope for scope in listings if listings[scope] is not before.listings.get(scope)}
        whole = {**known, **listings}
        frozen = before.frozen
        if restored or other_names:
            now, told = self._clock(), self._told.items()
            self._told = {key: end for key, end in told if now < end and not _is_listed(key, whole)}
            for scope in other_names:
                self._missing[scope] = self._missing_of(learning.records.part(scope), whole)
            missing = sum(map(len, self._missing.values()))
            frozen = None if restored else _vanished(missing, len(learning.records))
        same = not (restored or learning.learned) and (problems, frozen) == (before.problems, before.frozen)
        self._epoch, self._unread = epoch, learning.unread
        self._keep(learning, whole, problems, frozen, same=same)
        return not same

    def _missing_of(self, records: Mapping[AdapterKey, Record], listings: _Listings) -> set[AdapterKey]:
        return {key for key in records if key not in self._told and not _is_listed(key, listings)}

    def _keep(
        self,
        learning: Learning,
        listings: _Listings,
        problems: Mapping[str, str],
        frozen: str | None,
        *,
        same: bool = False,
    ) -> None:
        self._records, self._pointers = learning.records.whole(), learning.pointers.whole()
        version = self.desired.version + (not same)
        self.desired = Desired(version, self._records, self._pointers, listings, problems, frozen)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """While 100,000 records are made, none of them garbage: looking for some took half of a cold start."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


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


def _is_listed(key: AdapterKey, listings: _Listings) -> bool:
    entries = listings[key.scope].revisions.get(key.revision)
    return entries is not None and key.name in entries.records


def _vanished(missing: int, known: int) -> str | None:
    if missing > max(5, known // 5):
        return (
            f"{missing} of {known} records vanished from the volume at once; "
            "nothing is unloaded for it: is the right volume mounted?"
        )
    return None
