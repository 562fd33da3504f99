"""Leases: lockfiles that say who should do the work. They save work; they prove nothing.

Correctness stands on ``atomic.publish`` alone. A writer goes on without a lease that it cannot acquire in
time, so neither a dead holder nor a read-only volume stops anybody.

filelock's ``SoftFileLease`` promises at most one holder while every holder keeps refreshing. A contender
acquires a dead holder's lease after LEASE_S of its own monotonic clock, in one attempt or over several.
filelock breaks a dead holder's lease only where the volume exchanges two names, as NFS and FUSE do not. Nor
does it break the empty lockfile of a holder killed while it made one. This module removes both after as long.
"""

from __future__ import annotations

import logging
import os
import random
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lora_fs.sidecar.errors import VolumeUnavailable
from lora_fs.sidecar.logs import event
from lora_fs.sidecar.registry.format.layout import TEMPORARY
from lora_fs.sidecar.registry.volume import atomic
from lora_fs.sidecar.registry.volume.folders import make_folder

if TYPE_CHECKING:
    from filelock import SoftFileLease

LEASE_S = 10.0
ABANDONED_S = 10.0
_REMEMBERED = 1024
_CHANCE = random.SystemRandom()  # its own: forked writers wait differently, and no other seed changes

logger = logging.getLogger(__name__)

Sight = tuple[bytes | None, int]  # a lockfile's content, which names its holder, and its mtime in ns

_contended: dict[str, SoftFileLease] = {}  # each has seen its holder for a while; one user at a time
_unchanged: dict[str, tuple[Sight, float]] = {}  # what a lockfile was like, and since when
_guard = threading.Lock()
os.register_at_fork(after_in_child=_contended.clear)  # filelock refuses what another process made


@dataclass(frozen=True, slots=True)
class Turn:
    """What asking for a lease came to. It is true if this process holds the lease.

    Attributes:
        failure: why the volume took no lockfile; None: it did not fail.
    """

    held: bool
    failure: Exception | None = None

    def __bool__(self) -> bool:
        return self.held

    @property
    def is_anothers(self) -> bool:
        """Whether somebody else holds it."""
        return not self.held and self.failure is None


@contextmanager
def lease(path: Path, *, wait_s: float) -> Iterator[Turn]:
    """Hold the lease at ``path`` inside the block. Yields whether it acquired the lease.

    Args:
        path: the lockfile, in a folder of a registry's root. filelock makes that folder wherever it is
            missing, an empty mount point included, so it is made here first.
        wait_s: seconds to wait for it; 0 asks once.
    """
    from filelock import LeaseSettingsMismatch, SoftFileLease, Timeout  # who only reads needs none of it

    with _guard:
        lock = _contended.pop(str(path), None)
    if lock is None:
        lock = SoftFileLease(path, lease_duration=LEASE_S, thread_local=False)
    try:
        if not path.parent.is_dir():
            make_folder(path.parent, root=path.parent.parent)
        lock.acquire(timeout=wait_s, poll_interval=_CHANCE.uniform(0.005, 0.02))
    except (Timeout, OSError, VolumeUnavailable, LeaseSettingsMismatch, RuntimeError) as error:
        # RuntimeError: no thread is left
        logger.debug("lease %s not acquired: %s", path.name, error, extra=event("lease.not_had"))
        if lock.is_locked:  # and nothing to refresh it
            with suppress(OSError):
                lock.release(force=True)
        with _guard:
            _contended.setdefault(str(path), lock)
            _remove_abandoned(path)
            for remembered in (_contended, _unchanged):  # the latest: of most leases nobody asks again
                while len(remembered) > _REMEMBERED:
                    del remembered[next(iter(remembered))]
        refused = isinstance(error, Timeout | LeaseSettingsMismatch)
        yield Turn(held=False, failure=None if refused else error)
        return
    try:
        yield Turn(held=True)
    finally:
        try:
            lock.release()
        except OSError as error:
            told = event("lease.not_released", lease=path.name)
            logger.warning("lease %s not released, it expires by itself: %s", path.name, error, extra=told)


def take_over(path: Path, *, within_s: float) -> bool:
    """Acquire a dead holder's lease and release it, which removes its file. Returns False if it is held.

    Args:
        within_s: seconds to try; a holder on another host counts as dead after LEASE_S.
    """
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        with lease(path, wait_s=0.25) as had:
            if had:
                return True
    return False


def _remove_abandoned(path: Path) -> None:
    """Remove the lockfile of a dead holder; a living one has refreshed its mtime meanwhile."""
    try:
        sight, now = _look(path), time.monotonic()
        seen, since = _unchanged.pop(str(path), (sight, now))  # and behind all others again
        if seen == sight and now - since >= (LEASE_S if sight[0] else ABANDONED_S):
            _take_away(path, sight)
        else:
            _unchanged[str(path)] = (sight, since if seen == sight else now)
    except (OSError, VolumeUnavailable) as error:
        _unchanged.pop(str(path), None)
        logger.debug("lease %s not looked at: %s", path.name, error, extra=event("lease.not_looked_at"))


def _look(path: Path) -> Sight:
    return atomic.read_bytes(path), path.lstat().st_mtime_ns


def _take_away(path: Path, judged: Sight) -> None:
    """Remove the judged lockfile; put another one, made meanwhile, back."""
    aside = path.with_name(f"{TEMPORARY}{secrets.token_hex(16)}")
    path.rename(aside)
    if _look(aside) != judged:
        with suppress(OSError):  # no hard links, or a third one: its holder finds out at its next refresh
            os.link(aside, path)
    aside.unlink()
