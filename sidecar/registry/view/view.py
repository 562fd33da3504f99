"""The desired state in memory: what the volume says, as last read, good as long as it lasts.

A view only learns: a generation replaces a lower one or one that is gone, a tombstone withdraws, and
*absence withdraws nothing*. It forgets a tombstone that listings lack. A view that saw no HEAD as late as its
floor may have missed one, and reads the whole volume anew. An unreadable file leaves the last good state in
force, and the view reports it. It reads each body once, since names never change. Where HEAD names the last
writes it reads those files alone. Otherwise it lists the tree, and passes over folders with the names of the
last scan. ``refresh`` blocks on the volume and belongs in a thread; ``desired`` is an immutable snapshot that
any thread may read.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

from lora_fs.sidecar.errors import VolumeUnavailable
from lora_fs.sidecar.model import Scope
from lora_fs.sidecar.registry.format.layout import Place, parse_place
from lora_fs.sidecar.registry.store.head import Head, parse_head, read_head
from lora_fs.sidecar.registry.store.reader import Known, Reader, ScopeListing
from lora_fs.sidecar.registry.view.learning import Learning
from lora_fs.sidecar.registry.view.missing import find_missing, is_listed, vanished
from lora_fs.sidecar.registry.view.snapshot import Desired

__all__ = ["Desired", "RegistryView"]

RETRY_S = 0.1  # at first; doubled up to RETRY_MOST_S while the same files cannot be read
RETRY_MOST_S = 30.0
LAG_LOOK_S = 1.0  # at first; doubled up to LAG_LOOK_MOST_S while a listing may lag behind HEAD
LAG_LOOK_MOST_S = 5.0
PATIENCE_S = 30.0  # of a first look, with files that do not answer
MOST_SPARED = 5  # of them, and fewer than the bodies that were read: more are a volume that fails

WITHDRAWN_S = 24 * 3600.0  # how long the view remembers unseen withdrawals: a replica may use them still


class RegistryView:
    """Keeps ``desired`` for some scopes of one registry.

    Args:
        scan_s: list the tree so often, whatever HEAD says.
        lag_s: how long a listing may lack what HEAD announced; for so long after HEAD moved the
            tree is listed again and again. 0 where listings are fresh.
        readers: threads that read bodies when many are new; more than one where each waits.
    """

    def __init__(
        self,
        registry: Reader,
        scopes: tuple[Scope, ...],
        *,
        scan_s: float = 300.0,
        lag_s: float = 0.0,
        readers: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry = registry
        self._scopes = scopes
        self._scan_s, self._lag = scan_s, _Lag(lag_s)
        self._readers = readers
        self._clock = clock
        self._head: bytes | None = None
        self._seen = Head()  # the last readable one: its writes are known
        self._anew_until: float | None = None  # the view missed tombstones, and a listing may still lag
        self._scanned_at: float | None = None
        self._refused_at: float | None = None  # the first look, at first
        self._retry_at, self._retry_s = 0.0, RETRY_S
        self._epoch = 0  # of the registry as last listed
        self._unread: Mapping[Path, set[str]] = {}  # names in a folder whose newest body is not held
        self._told: dict[Known, float] = {}  # writes that HEAD named, and until when a listing may lack them
        self._missing: dict[Scope, set[Known]] = {}
        self.desired = Desired()

    def follow(self, lag_s: float, readers: int) -> None:
        """Take another filesystem's ``lag_s`` and ``readers``: its volume was mounted since."""
        self._lag, self._readers = _Lag(lag_s), readers

    def refresh(self, *, force: bool = False, folders: Collection[Path] = ()) -> bool:
        """Read HEAD and the files that it lists; True if anything is new.

        Args:
            force: list the tree. The view also lists it unasked: if a scan is due, or if HEAD
                changed and does not name all writes.
            folders: revisions, or scopes, to list at least.
        Raises:
            VolumeUnavailable, RegistryLost: ``desired`` stays as it was.
        """
        if not self._registry.is_known:  # never open a HEAD that should be absent
            self._registry.check_identity()
        if self._scanned_at is None:
            self._epoch = self._registry.marker.epoch
        self._registry.sweep()
        head = read_head(self._registry.layout)
        now = self._clock()
        due = force or self._scanned_at is None or now - self._scanned_at >= self._scan_s
        due |= bool(self._unread) and now >= self._retry_at
        due |= bool(folders) and bool(self.desired.problems)  # a part of the tree cannot say if they last
        moved = head != self._head
        at = parse_head(head) if moved else None
        missed = at is not None and at.epoch == self._epoch and at.forgot_since(self._seen)
        if missed and self._scanned_at is not None:
            self._anew_until = now + self._lag.lag_s
        told = None if missed else self._told_of(at) if moved else []
        if told is None or told or due or folders or head is None or self._lag.due(now):
            self._registry.check_identity()
        changed = self._learn_told(told) if told is not None else None
        if changed is None:
            self._lag.begin(now)
            due, changed = True, False
        if due or self._lag.due(now):
            changed |= self._scan(dict.fromkeys(self._scopes), anew=self._anew_until is not None)
            if self._anew_until is not None and now >= self._anew_until:
                self._anew_until = None
            self._scanned_at = now
            self._lag.looked(now)
            self._retry_s = RETRY_S if changed else min(2 * self._retry_s, RETRY_MOST_S)
            self._retry_at = now + self._retry_s
        elif folders:
            changed |= self._scan(self._with_folders(folders))
        if moved:
            self._head, self._seen = head, at or self._seen
        return changed

    def _with_folders(self, folders: Collection[Path]) -> dict[Scope, Collection[Path] | None]:
        """The scopes to list for ``folders``, and which of these: None is the whole scope."""
        found: dict[Scope, Collection[Path] | None] = {}
        for scope in self._scopes:
            home = self._registry.layout.scope(scope)
            if any(home.is_relative_to(folder) for folder in folders):
                found[scope] = None
            elif inside := {folder for folder in folders if folder.is_relative_to(home)}:
                found[scope] = inside
        return found

    def _told_of(self, head: Head | None) -> list[Place] | None:
        """The writes in these scopes since the last look, by HEAD; None if HEAD does not say."""
        files = head.since(self._seen.nonce) if head is not None and head.epoch == self._epoch else None
        places = [parse_place(file) for file in files or ()]
        if files is None or None in places:
            return None
        return [place for place in places if place is not None and place.scope in self._scopes]

    def _learn_told(self, places: list[Place]) -> bool | None:
        """Read what HEAD announced; None if it takes a listing of the tree."""
        if self._registry.marker.epoch != self._epoch:
            return None
        if not places:
            return False
        learning = Learning(self._registry, self._readers, self.desired, {})
        for place in places:
            if self._is_problem(place) or not learning.told(place.key, place.generation):
                return None
        if not all(learning.knows_what_it_names(place) for place in places):
            return None  # its record's writer died before its HEAD
        until = self._clock() + self._lag.lag_s
        self._told |= {place.key: until for place in places}
        if learning.learned:
            records, pointers = learning.records.whole(), learning.pointers.whole()
            self.desired = replace(self.desired, records=records, pointers=pointers)
        return learning.learned

    def _is_problem(self, place: Place) -> bool:
        """Whether its series has a reported problem already, which a listing has to clear."""
        series = self._registry.series(place.key)
        return any(text.startswith(f"{series.folder}/{series.name}.@") for text in self.desired.problems)

    def _learning(self) -> Learning:
        """Start a look at the tree, on top of the current view."""
        unread = {folder: set(names) for folder, names in self._unread.items()}
        for series in map(self._registry.series, self._told):  # the last listing had an earlier one, or none
            unread.setdefault(series.folder, set()).add(series.name)
        gone = set[Known]().union(*self._missing.values())
        return Learning(self._registry, self._readers, self.desired, unread, gone)

    def _scan(self, scopes: dict[Scope, Collection[Path] | None], *, anew: bool = False) -> bool:
        """List scopes, and read what is new in them; ``anew``: tombstones may have come and gone."""
        before, epoch = self.desired, self._registry.marker.epoch
        restored = epoch != self._epoch
        anew |= restored
        if anew:
            scopes = dict.fromkeys(self._scopes)
        learning = Learning(self._registry, self._readers, Desired(), {}) if anew else self._learning()
        known: Mapping[Scope, ScopeListing] = {} if anew else before.listings
        unlisted: dict[Path, VolumeUnavailable] = {}
        listings = {
            scope: self._registry.scan(scope, known.get(scope), unlisted, folders)
            for scope, folders in scopes.items()
        }
        if self._scanned_at is None or anew:
            _refuse(unlisted.values())
        with nullcontext() if self._scanned_at is not None else _collector_paused():
            for scope, listing in listings.items():
                learning.scope(scope, listing, known.get(scope, ScopeListing()))
        if self._scanned_at is None or anew:
            self._refuse_files(learning)
        problems = learning.problems | {str(path): str(error) for path, error in unlisted.items()}
        for path in unlisted:
            learning.unread.setdefault(path, set())
        if anew:
            now = self._clock()
            self._told = {key: end for key, end in self._told.items() if end > now and not restored}
            gone = [] if restored else learning.withdraw(before, unlisted, self._told)
            self._told |= dict.fromkeys(gone, now + WITHDRAWN_S)
            self._missing = {}
        other_names = {scope for scope in listings if listings[scope] is not before.listings.get(scope)}
        whole = {**known, **listings}
        other_names |= self._forget_told(whole, scopes, unlisted)
        frozen = before.frozen
        if anew or other_names:
            for scope in other_names:
                self._missing[scope] = find_missing(scope, learning, whole, self._told)
            missing = set[Known]().union(*self._missing.values())
            counts = len(learning.records), len(learning.pointers)
            frozen = None if restored else vanished(missing, *counts)
        same = not (anew or learning.learned) and (problems, frozen) == (before.problems, before.frozen)
        self._epoch, self._unread = epoch, learning.unread
        records, pointers = learning.records.whole(), learning.pointers.whole()
        self.desired = Desired(records, pointers, whole, problems, frozen)
        return not same

    def _refuse_files(self, learning: Learning) -> None:
        """Raise the reason why the first state is unknown, unless a few files alone never answer.

        A file that is lost for good, as in a split brain of GlusterFS, must keep no replica from starting.
        """
        now, read = self._clock(), len(learning.records) + len(learning.pointers)
        self._refused_at = now if self._refused_at is None else self._refused_at
        if len(learning.failures) > min(MOST_SPARED, read - 1) or now - self._refused_at < PATIENCE_S:
            _refuse(learning.failures)
        self._refused_at = None

    def _forget_told(
        self,
        listings: Mapping[Scope, ScopeListing],
        scopes: Mapping[Scope, Collection[Path] | None],
        unlisted: Collection[Path],
    ) -> set[Scope]:
        """Forget what HEAD announced once it is listed, or once this listing of its folder must hold it.

        Returns:
            The scopes of the latter.
        """
        now, late = self._clock(), set()
        for key, end in list(self._told.items()):
            series = self._registry.series(key)
            at, folders = series.folder, scopes.get(series.scope, ())
            looked = (folders is None or at in folders) and at not in unlisted
            if is_listed(key, listings):
                del self._told[key]
            elif looked and now >= end:
                del self._told[key]
                late.add(series.scope)
        return late


def _refuse(failures: Iterable[VolumeUnavailable]) -> None:
    """Raise the reason why the first state is unknown. A permission error is permanent."""
    for error in failures:
        if not isinstance(error.__cause__, PermissionError):
            raise error


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
        self.lag_s = lag_s
        self._end = self._pause_s = 0.0
        self._next: float | None = None

    def begin(self, now: float) -> None:
        self._next, self._end, self._pause_s = now, now + self.lag_s, LAG_LOOK_S

    def due(self, now: float) -> bool:
        return self._next is not None and now >= self._next

    def looked(self, now: float) -> None:
        if self.due(now):
            self._next = min(now + self._pause_s, self._end) if now < self._end else None
            self._pause_s = min(2 * self._pause_s, LAG_LOOK_MOST_S)
