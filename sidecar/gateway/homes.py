"""An adapter's own order of the replicas, and how many homes its share of the demand asks for. No I/O.

The order is rendezvous hashing: every gateway computes the same one, and a replica that comes or goes moves
only the adapters that it is first for. Demand counts have a half-life, so that they follow the present.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from lora_fs.sidecar.reconcile.placement import rendezvous

HALF_LIFE_S: Final = 30.0
SHARE: Final = 0.6  # of one replica's part of all requests, that one home takes
EVIDENCE: Final = 20.0  # requests before a share counts
SHRINK_S: Final = 60.0  # how long the demand must stay lower before a home goes
KEPT: Final = 65_536  # adapters whose demand it remembers


@lru_cache(4096)
def order(adapter: str, names: frozenset[str]) -> Sequence[str]:
    """Return ``rendezvous`` of ``names``."""
    return rendezvous(adapter, names)


class Demand:
    """How many requests each adapter gets, and how many homes that gives it.

    Homes come at once. One at a time goes, ``SHRINK_S`` after the last request that needed it.
    """

    def __init__(self) -> None:
        self._counts: OrderedDict[str, float] = OrderedDict()  # in units of a request at ``_began``
        self._homes: dict[str, tuple[int, float]] = {}
        self._total, self._began = 0.0, 0.0

    def asked(self, adapter: str, now: float) -> None:
        """Count one request at ``now``, in seconds."""
        unit = self._unit(now)
        self._counts[adapter] = self._counts.pop(adapter, 0.0) + unit
        self._total += unit
        if len(self._counts) > KEPT:
            gone, count = self._counts.popitem(last=False)
            self._total -= count
            self._homes.pop(gone, None)

    def share(self, adapter: str) -> float:
        """Return the adapter's part of all requests, 0 to 1."""
        return self._counts.get(adapter, 0.0) / self._total

    def copies(self, adapter: str, replicas: int, now: float) -> int:
        """Return how many homes ``adapter`` has among ``replicas``, 1 to all of them."""
        wanted = 1
        if self._total >= EVIDENCE * self._unit(now):
            wanted = math.ceil(self.share(adapter) * replicas / SHARE)
        wanted = max(1, min(replicas, wanted))
        had, since = self._homes.get(adapter, (1, now))
        if wanted < had and now - since >= SHRINK_S:
            had, since = had - 1, now
        elif wanted >= had:
            had, since = wanted, now
        if had > 1:
            self._homes[adapter] = had, since
        else:
            self._homes.pop(adapter, None)
        return min(had, replicas)

    def _unit(self, now: float) -> float:
        """Return what a request at ``now`` counts, and count all anew before that grows too large."""
        halves = (now - self._began) / HALF_LIFE_S
        if halves > 64:
            scale = 2.0**-halves
            self._counts = OrderedDict((one, count * scale) for one, count in self._counts.items())
            self._total *= scale
            self._began, halves = now, 0.0
        return float(2.0**halves)
