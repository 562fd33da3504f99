"""Folders that may become adapters: since when each holds still, and why no replica adopts it.

Folders dropped into the tree and those of a flat store get the same checks. A reason stays in the report for
as long as it lasts; the log has it when its kind changes.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Literal, TypeVar

from lora_fs.sidecar.errors import (
    InputError,
    InvalidAdapter,
    LoraFsError,
    OperatorError,
    OverQuota,
    TooManyRegistrations,
    VolumeUnavailable,
)
from lora_fs.sidecar.registry.drops import transfer_markers
from lora_fs.sidecar.registry.drops.disappearances import told
from lora_fs.sidecar.registry.format.layout import REGISTERING
from lora_fs.sidecar.registry.lifecycle import artifacts
from lora_fs.sidecar.registry.lifecycle.artifacts import Sight

logger = logging.getLogger(__name__)

RETRY_S = 5.0  # after the volume, or another replica at work, stopped an adoption
QUOTA_RETRY_S = 30.0  # after the namespace's quota did
COPIED_S = 60.0  # after its last change, a refused folder may still be half of a copy
UNFINISHED = (
    f"Unfinished: who registers copied it and wrote no record yet; if that ended, `lora-fs gc` removes it in "
    f"a day. If it is your own folder, remove {REGISTERING} from it"
)
LINK = "SymbolicLink: it is not followed; `lora-fs register --link` refers to a folder"
CROWDED = f"TooManyFiles: it holds more than {artifacts.MAX_ENTRIES}: an adapter has a handful"

Key = TypeVar("Key", bound=Hashable)


@dataclass(slots=True)
class Candidate:
    """A folder at its last look. ``fingerprint`` is empty if the look failed."""

    fingerprint: str
    still_since: float
    refused: str | None = None  # why the adopter refused this fingerprint
    retried: bool = False  # the refusal may end without the files changing
    momentary: bool = False  # the volume failed: try again without a look at every folder
    not_before: float = 0.0
    replaces: int | None = None  # the pointer's generation when an adoption began that did not end

    def is_open(self, now: float) -> bool:
        """Whether it settles, waits for the volume, or changed so lately that it may be half of a copy."""
        changed_lately = bool(self.fingerprint) and now - self.still_since < COPIED_S
        return self.refused is None or self.momentary or changed_lately


class Candidates(dict[Key, Candidate], Generic[Key]):
    """By key, those last tried at the end. One thread owns them; any may ask for ``refusals``."""

    def look(self, key: Key, folder: Path, now: float, *, link: bool = True) -> Sight | None:
        """Look at a folder. None if it is gone, or refused as it is; ``refusals`` then has the reason.

        Args:
            link: report a symlink in its place.
        """
        try:
            sight = artifacts.look(folder)
            linked = sight is None and link and folder.is_symlink()
        except (LoraFsError, OSError) as error:
            self.retry(key, self.unseen(key, now), error, now)
            return None
        if sight is not None and not sight.crowded:
            return sight
        if linked or sight is not None:
            self.refuse(key, self.unseen(key, now), LINK if linked else CROWDED)
        else:
            self.pop(key, None)
        return None

    def unseen(self, key: Key, now: float) -> Candidate:
        """A candidate without a fingerprint. It keeps the pointer that an unfinished adoption replaces."""
        known = self.get(key)
        return Candidate("", now, replaces=known.replaces if known is not None else None)

    def settled(self, key: Key, folder: Path, sight: Sight, settle_s: float, now: float) -> Candidate | None:
        """The candidate once it held still for ``settle_s`` and no transfer is under way; else None."""
        candidate = self.get(key)
        if candidate is None or candidate.fingerprint != sight.fingerprint:
            candidate = self[key] = Candidate(sight.fingerprint, now)
        marked = transfer_markers.is_marked(sight)
        waits = now < candidate.not_before or (not marked and now - candidate.still_since < settle_s)
        if waits or (candidate.refused and not candidate.retried):
            return None
        if REGISTERING in sight.names:
            self.refuse(key, candidate, UNFINISHED)
            return None
        try:
            part = None if marked else transfer_markers.unfinished(folder, sight)
        except VolumeUnavailable as error:
            self.retry(key, candidate, error, now)
            return None
        if part is None:
            return candidate
        why = f"Unfinished: a transfer is under way or was broken off: {part} lies in it"
        self.refuse(key, candidate, why, retried=True)
        return None

    def refusals(self) -> Mapping[Key, str]:
        """Folders that the adopter refuses, and why. Reads a copy, which no thread changes."""
        return {key: one.refused for key, one in self.copy().items() if one.refused}

    def due(self, now: float) -> bool:
        """Whether an open candidate waits for a look."""
        return any(one.not_before <= now for one in self.values() if one.is_open(now))

    def failed(self, key: Key, candidate: Candidate, error: LoraFsError, now: float) -> Literal[False]:
        """Keep why the registration failed, and retry if the reason may pass."""
        if isinstance(error, OverQuota | TooManyRegistrations | OperatorError):
            candidate.not_before = now + QUOTA_RETRY_S
            return self.refuse(key, candidate, error, retried=True)
        if isinstance(error, InputError):
            return self.refuse(key, candidate, error, retried=_may_pass(error))
        return self.retry(key, candidate, error, now)

    def refuse(
        self, key: Key, candidate: Candidate, why: str | Exception, *, retried: bool = False
    ) -> Literal[False]:
        """Keep why it is refused: until its files change, or ``retried`` at each look at all folders."""
        self._keep(key, candidate, why, "folder %s is not adopted: %s", "adoption.refused")
        candidate.retried, candidate.momentary = retried, False
        if not retried:
            candidate.not_before = 0.0  # only other files help, and those are looked for
        return False

    def retry(self, key: Key, candidate: Candidate, why: str | Exception, now: float) -> Literal[False]:
        """Keep the volume's error, and retry after RETRY_S."""
        self._keep(key, candidate, why, "adoption of %s is retried: %s", "adoption.retried")
        candidate.retried, candidate.momentary = True, True
        candidate.not_before = now + RETRY_S
        return False

    def _keep(self, key: Key, candidate: Candidate, why: str | Exception, log: str, name: str) -> None:
        text = why if isinstance(why, str) else f"{type(why).__name__}: {why}"
        before = self.get(key)
        if before is None or before.refused is None or _kind(before.refused) != _kind(text):
            logger.warning(log, key, text, extra=told(name, key))
        candidate.refused = text
        self[key] = candidate


def _may_pass(error: InputError) -> bool:
    """A change of mode, owner, or a link on the way leaves no trace in the fingerprint."""
    refused = isinstance(error, InvalidAdapter) and any(one.code == "permission" for one in error.findings)
    return refused or isinstance(error, artifacts.SymbolicLink)


def _kind(refused: str) -> str:
    return refused.partition(":")[0]
