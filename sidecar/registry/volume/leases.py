"""Leases: lockfiles that say who should be working. They save work; they prove nothing.

Correctness stands on ``atomic.publish`` alone, so a lease that cannot be had in time is
passed over rather than waited for: a holder that died, or a read-only volume, stops nobody.

Promise (filelock's ``SoftFileLease``): at most one holder while every holder keeps refreshing;
a dead holder's claim can be taken after LEASE_S of the contender's own monotonic clock, in one
attempt or over several: a contender that asks again goes on from what it saw before. What filelock
does not break is removed after as long: an empty lockfile, as a holder killed while it made one
leaves it, after ABANDONED_S, and any where two names cannot be exchanged, as on NFS and FUSE.
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
from pathlib import Path

from filelock import LeaseSettingsMismatch, SoftFileLease, Timeout

from lora_fs.sidecar.errors import VolumeUnavailable
from lora_fs.sidecar.logs import event
from lora_fs.sidecar.registry.format.layout import TEMPORARY
from lora_fs.sidecar.registry.volume import atomic

LEASE_S = 10.0
ABANDONED_S = 10.0
_REMEMBERED = 1024

logger = logging.getLogger(__name__)

Sight = tuple[bytes | None, int]  # a lockfile's content, which names its holder, and its mtime in ns

_contended: dict[str, SoftFileLease] = {}  # each has seen its holder for a while; one user at a time
_unchanged: dict[str, tuple[Sight, float]] = {}  # what a lockfile was like, and since when
_guard = threading.Lock()
os.register_at_fork(after_in_child=_contended.clear)  # filelock refuses what another process made


@contextmanager
def lease(path: Path, *, wait_s: float) -> Iterator[bool]:
    """Hold the lease at ``path`` inside the block; yields whether it was had.

    Args:
        path: the lockfile; its folder exists.
        wait_s: how long to wait for it; 0 asks once.
    """
    with _guard:
        lock = _contended.pop(str(path), None)
    if lock is None:
        lock = SoftFileLease(path, lease_duration=LEASE_S, thread_local=False)
    try:
        lock.acquire(timeout=wait_s, poll_interval=random.uniform(0.005, 0.02))
    except (Timeout, OSError, LeaseSettingsMismatch, RuntimeError) as error:  # the last: no thread is left
        logger.debug("lease %s not had: %s", path.name, error, extra=event("lease.not_had"))
        if lock.is_locked:  # and nothing to refresh it
            with suppress(OSError):
                lock.release(force=True)
        with _guard:
            _contended.setdefault(str(path), lock)
            _remove_abandoned(path)
            for remembered in (_contended, _unchanged):  # the latest: of most leases nobody asks again
                while len(remembered) > _REMEMBERED:
                    del remembered[next(iter(remembered))]
        yield False
        return
    try:
        yield True
    finally:
        try:
            lock.release()
        except OSError as error:
            told = event("lease.not_released", lease=path.name)
            logger.warning("lease %s not released, it expires by itself: %s", path.name, error, extra=told)


def take_over(path: Path, *, within_s: float) -> bool:
    """Have a dead holder's lease and give it back, which removes its file; False if somebody holds it.

    Args:
        within_s: how long to ask; a holder elsewhere is known to be dead after LEASE_S alone.
    """
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        with lease(path, wait_s=0.25) as had:
            if had:
                return True
    return False


def _remove_abandoned(path: Path) -> None:
    """Take the lockfile of a dead holder away; a living one has refreshed its mtime meanwhile."""
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
    """Remove it unless it is another one by now, whose holder has it back."""
    aside = path.with_name(f"{TEMPORARY}{secrets.token_hex(16)}")
    path.rename(aside)
    if _look(aside) != judged:
        with suppress(OSError):  # no hard links, or a third one: its holder finds out at its next refresh
            os.link(aside, path)
    aside.unlink()
