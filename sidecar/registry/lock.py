"""Leases: lockfiles that say who should be working. They save work; they prove nothing.

Correctness stands on ``atomic.publish`` alone, so a lease that cannot be had in time is
passed over rather than waited for: a holder that died, or a read-only volume, stops nobody.

Promise (filelock's ``SoftFileLease``): at most one holder while every holder keeps refreshing;
a dead holder's claim can be taken after LEASE_S of the contender's own monotonic clock, in one
attempt or over several: a contender that asks again goes on from what it saw before. An empty
lockfile, as a holder killed while it made one leaves it, is removed after ABANDONED_S.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import LeaseSettingsMismatch, SoftFileLease, Timeout

LEASE_S = 10.0
ABANDONED_S = 10.0
_REMEMBERED = 1024

logger = logging.getLogger(__name__)

_contended: dict[str, SoftFileLease] = {}  # each has seen its holder for a while; one user at a time
_empty: dict[str, tuple[tuple[int, int], float]] = {}  # filelock never breaks one: which, and since when
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
    except (Timeout, OSError, LeaseSettingsMismatch) as error:
        logger.debug("lease %s not had: %s", path.name, error)
        with _guard:
            if len(_contended) < _REMEMBERED:
                _contended.setdefault(str(path), lock)
            _remove_abandoned(path)
        yield False
        return
    try:
        yield True
    finally:
        try:
            lock.release()
        except OSError as error:
            logger.warning("lease %s not released, it expires by itself: %s", path.name, error)


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
    try:
        status = path.lstat()
        if status.st_size:
            _empty.pop(str(path), None)
            return
        which, now = (status.st_ino, status.st_ctime_ns), time.monotonic()
        seen, since = _empty.get(str(path), (which, now))
        if seen == which and now - since >= ABANDONED_S:
            _empty.pop(str(path), None)
            path.unlink()
        elif len(_empty) < _REMEMBERED or str(path) in _empty:
            _empty[str(path)] = (which, since if seen == which else now)
    except OSError as error:
        logger.debug("lease %s not looked at: %s", path.name, error)
