"""Leases: lockfiles that say who should be working. They save work; they prove nothing.

Correctness stands on ``atomic.publish`` alone, so a lease that cannot be had in time is
passed over rather than waited for: a holder that died, or a read-only volume, stops nobody.

Promise (filelock's ``SoftFileLease``): at most one holder while every holder keeps refreshing;
a dead holder's claim can be taken after LEASE_S of the contender's own monotonic clock.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import SoftFileLease, Timeout

LEASE_S = 10.0

logger = logging.getLogger(__name__)


@contextmanager
def lease(path: Path, *, wait_s: float) -> Iterator[bool]:
    """Hold the lease at ``path`` inside the block; yields whether it was had.

    Args:
        path: the lockfile; its folder exists.
        wait_s: how long to wait for it; 0 asks once.
    """
    lock = SoftFileLease(path, lease_duration=LEASE_S, thread_local=False)
    try:
        lock.acquire(timeout=wait_s, poll_interval=random.uniform(0.005, 0.02))
    except (Timeout, OSError) as error:
        logger.debug("lease %s not had: %s", path.name, error)
        yield False
        return
    try:
        yield True
    finally:
        try:
            lock.release()
        except OSError as error:
            logger.warning("lease %s not released, it expires by itself: %s", path.name, error)
