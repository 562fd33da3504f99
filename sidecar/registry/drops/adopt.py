"""Folder drops: a folder copied into the tree becomes a registered adapter, once it is whole.

A replica adopts a folder if no transfer is under way in it and it validates. Its (path, size, mtime) set must
hold still for the settle time on this process's monotonic clock. An unreadable record is a record: nobody
dropped the folder beside it. Any replica may adopt; the lease saves reading it twice, and the
compare-and-set makes a double harmless. ``disappearances`` handles folders that went, ``candidates`` those
that wait.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from lora_fs.sidecar.errors import LoraFsError
from lora_fs.sidecar.model import AdapterKey, Record, Scope
from lora_fs.sidecar.registry.drops.candidates import RETRY_S, Candidate, Candidates
from lora_fs.sidecar.registry.drops.disappearances import Withdrawals, told
from lora_fs.sidecar.registry.drops.seen import Seen, may_be_a_drop
from lora_fs.sidecar.registry.lifecycle import ingest, release
from lora_fs.sidecar.registry.lifecycle.ingest import Registration
from lora_fs.sidecar.registry.store import gating
from lora_fs.sidecar.registry.store.reader import ScopeListing
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.registry.view.snapshot import Desired
from lora_fs.sidecar.registry.volume import atomic
from lora_fs.sidecar.registry.volume.leases import lease
from lora_fs.sidecar.registry.volume.mounts import is_read_only
from lora_fs.sidecar.validate import Expectation

__all__ = ["RETRY_S", "Adopter"]

logger = logging.getLogger(__name__)

ADOPTING_S = 2.0  # of one step, so that ten thousand new folders do not hide other changes
PATIENCE_S = 0.25  # with another writer of a namespace that has a quota
OUTSIDE = (
    "SymbolicLink: a folder on its way leads out of the registry and of every folder that this replica may "
    "read from; name that in LORA_FS_ALLOWED_SOURCES"
)
UNREADABLE = (
    "RecordUnreadable: its record is there and cannot be read: mend it (`lora-fs fsck`), or register the "
    "revision anew"
)
FULL_LOOK_S = 5.0  # while folders settle, the adopter looks at all others this often


class Adopter:
    """Watches the folders of some scopes across passes. One thread owns it; any may ask for ``refusals``.

    Args:
        find: returns where a folder lies if it may be read and no link is on its way, else None. The adopter
            opens that path without following links: a link that somebody puts there later leads nowhere.
    Attributes:
        adopting_s: what the last step spent on reading and registering folders, in seconds.
    """

    def __init__(
        self,
        registry: Registry,
        expectation: Expectation,
        *,
        settle_s: float,
        writer: str,
        find: Callable[[Path], Path | None] = lambda folder: atomic.real_path(folder.parent) / folder.name,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry = registry
        self._expectation = expectation
        self.settle_s = settle_s
        self._writer = writer
        self._find = find
        self._clock = clock
        self._candidates = Candidates[AdapterKey]()
        self._withdrawals = Withdrawals(registry, writer)
        self._seen: dict[Scope, Seen] = {}
        self._full_look_at, self.adopting_s = 0.0, 0.0
        self._frozen = False

    def refusals(self) -> Mapping[AdapterKey, str]:
        """Folders that the adopter refuses, and why. From any thread."""
        return self._candidates.refusals()

    def waiting(self) -> bool:
        """Whether a folder is settling: the caller should come back soon."""
        if self._frozen:
            return False
        return self._candidates.due(self._clock()) or bool(self._withdrawals.in_doubt())

    def in_doubt(self) -> set[Path]:
        """The folders to list again before the next step, because they were missing once."""
        layout = self._registry.layout
        return {layout.revision(key.scope, key.revision) for key in self._withdrawals.in_doubt()}

    def step(
        self, desired: Desired, *, everywhere: bool = True, dropped: Collection[AdapterKey] = ()
    ) -> bool:
        """Look at the folders once; True if the registry changed.

        Args:
            everywhere: at those, too, whose listing is the one of the last step.
            dropped: folders that came, listed or not.
        """
        self._frozen, self.adopting_s = desired.frozen is not None, 0.0
        if self._frozen:
            self._withdrawals.forget()
            self._seen.clear()
            return False
        now = self._clock()
        full = everywhere and (not self._candidates or now - self._full_look_at >= FULL_LOOK_S)
        if full:
            self._full_look_at = now
        listed = {
            scope: Seen.of(scope, desired, self._seen.get(scope))
            for scope, listing in desired.listings.items()
            if everywhere or scope not in self._seen or listing is not self._seen[scope].listing
        }
        self._forget_what_went(listed)
        settling, changed = list(self._candidates), False
        for scope, seen in listed.items():
            before = self._seen.get(scope)
            for key in seen.possible_drops(scope) if full else seen.new_folders(scope, before):
                if key not in self._candidates:
                    changed |= self._consider(key, desired)
        for key in dict.fromkeys([*settling, *dropped]):
            if key not in self._candidates or self.adopting_s <= ADOPTING_S:
                changed |= self._consider(key, desired)
        changed |= self._withdrawals.step(listed, self._seen)
        self._seen |= listed
        return changed

    def adopt(self, key: AdapterKey) -> str | None:
        """Adopt one folder that has no record, now. Returns None, or why not."""
        if self._consider(key, Desired()):
            return None
        return self.refusals().get(key, "it could not be adopted now: a sidecar may be at it")

    def _forget_what_went(self, listed: Mapping[Scope, Seen]) -> None:
        """Drop the candidates whose folders are not listed any more; opens none of them: see ``atomic``."""
        for key in list(self._candidates):
            if key.scope in listed and key.name not in listed[key.scope].listing.of(key.revision).folders:
                del self._candidates[key]

    def _consider(self, key: AdapterKey, desired: Desired) -> bool:
        record = desired.records.get(key)
        if not may_be_a_drop(record):
            self._candidates.pop(key, None)
            return False
        folder, now = self._registry.layout.artifact(key), self._clock()
        sight = self._candidates.look(key, folder, now, link=record is None)
        if sight is None:
            return False
        unread = self._unread(key, desired) if record is None else None
        damaged = unread in desired.problems
        if unread is not None and not (damaged and self._may_be_half(key, desired)):
            if damaged:
                return self._candidates.refuse(key, self._candidates.unseen(key, now), UNREADABLE)
            self._candidates.pop(key, None)
            return False
        if record is not None and record.spec.fingerprint == sight.fingerprint:
            return self._activate_left_over(key, desired, record)
        candidate = self._candidates.settled(key, folder, sight, self.settle_s, now)
        if candidate is None or self.adopting_s > ADOPTING_S:
            return False
        adopted = self._adopt(key, candidate, is_new=record is None and unread is None)
        self.adopting_s += self._clock() - now
        return adopted

    def _unread(self, key: AdapterKey, desired: Desired) -> str | None:
        """The file of a listed record that this view does not know: damaged, or not read yet."""
        listing = desired.listings.get(key.scope, ScopeListing()).of(key.revision)
        if key.name not in listing.records:
            return None
        return str(self._registry.records(key).file(listing.records[key.name]))

    def _may_be_half(self, key: AdapterKey, desired: Desired) -> bool:
        """Whether a record that cannot be read may be what a killed adopter began to write.

        Without hard links it has its name before its bytes; where nothing serves the name, no harm is done.
        """
        return self._registry.marker.tier == "lww" and (key.scope, key.name) not in desired.pointers

    def _adopt(self, key: AdapterKey, candidate: Candidate, *, is_new: bool) -> bool:
        folder = self._registry.layout.artifact(key)
        task = f"adopt-{key.scope.namespace}--{key.model}--{key.revision}--{key.name}"[:200]
        candidate.not_before = self._clock() + RETRY_S
        self._candidates[key] = self._candidates.pop(key)  # behind those not tried yet
        with lease(self._registry.layout.lease(task), wait_s=0) as had:
            if had.is_anothers or (had.failure is not None and is_read_only(folder)):
                return False  # another replica adopts it
            try:
                source = self._find(folder)
                if source is None:
                    return self._candidates.refuse(key, candidate, OUTSIDE, retried=True)
                if is_new and self._registry.generations(self._registry.records(key)):
                    return False  # registered meanwhile, or damaged: whoever looks next knows which
                pointer = release.active(self._registry, key.scope, key.name)
                candidate.replaces = pointer.generation if pointer is not None else 0
                ingest.register(
                    self._registry,
                    key.scope,
                    Registration(
                        key.name,
                        source,
                        f"file://{folder}",
                        revision=key.revision,
                        activate=self._may_activate(key),
                        origin="folder",
                        resolved=True,
                        fingerprint=candidate.fingerprint,
                    ),
                    self._expectation,
                    writer=self._writer,
                    patience_s=PATIENCE_S,
                )
            except LoraFsError as error:
                return self._candidates.failed(key, candidate, error, self._clock())
        del self._candidates[key]
        logger.info("adopted %s", key, extra=told("adopted", key))
        return True

    def _activate_left_over(self, key: AdapterKey, desired: Desired, record: Record) -> bool:
        """Point the name at a record that an adoption left without a pointer.

        If another adopter was killed, the name never had a pointer. If this one met a failing volume, the
        pointer has not moved since.
        """
        candidate, now = self._candidates.get(key), self._clock()
        known = desired.pointers.get((key.scope, key.name))
        replaces = candidate.replaces if candidate is not None else None
        is_unread = known is None and self._may_be_pointed(key, desired)
        if not record.present or is_unread or (known is not None and known.generation != replaces):
            self._candidates.pop(key, None)
            return False
        if candidate is not None and now < candidate.not_before:
            return False
        try:
            pointer = release.active(self._registry, key.scope, key.name)
            moved = pointer is not None and pointer.generation != replaces
            left_over = not moved and self._may_activate(key)
            if left_over:
                release.promote(
                    self._registry, key.scope, key.name, key.revision, writer=self._writer, only_later=True
                )
        except LoraFsError as error:
            why = f"{type(error).__name__}: it is registered and not active yet: {error}"
            return self._candidates.retry(key, candidate or Candidate("", now), why, now)
        self._candidates.pop(key, None)
        return left_over

    def _may_be_pointed(self, key: AdapterKey, desired: Desired) -> bool:
        """Whether its name has a pointer, readable or not; without hard links it may be half of one."""
        listing = desired.listings.get(key.scope, ScopeListing())
        return key.name in listing.pointers and self._registry.marker.tier == "cas"

    def _may_activate(self, key: AdapterKey) -> bool:
        """Whether no gate asks a person to evaluate and promote it, once it has a record."""
        return gating.required_gate(self._registry, key.namespace) is None
