"""The last hour of one replica, a sample every ten seconds, in memory: for the plot."""

from __future__ import annotations

import time
from collections import deque
from statistics import median
from typing import Final

from lora_fs.sidecar.model import Phase
from lora_fs.sidecar.server.dashboard.columns import UNDER_WAY
from lora_fs.sidecar.server.ports import ReplicaPort

EVERY_S: Final = 10.0
KEPT: Final = 361
COLUMNS: Final = (
    "at",  # unix seconds
    "loaded",  # in the engine
    "under_way",  # loading, or waiting for a load
    "failed",
    "in_flight",  # requests
    "hits",  # of this interval, as all below: requests that found their adapter in the engine
    "misses",  # that did not
    "loads",
    "failures",
    "load_s",  # median of the loads, null of none
    "load_most_s",
)
_COUNTED = ("request_hits_total", "request_misses_total", "loads_total", "load_failures_total")

Sample = tuple[float | None, ...]


class History:
    """Lives on the event loop. ``samples`` are (number, sample), the oldest first."""

    def __init__(self, replica: ReplicaPort) -> None:
        self._replica = replica
        self.samples: deque[tuple[int, Sample]] = deque(maxlen=KEPT)
        self._number = 0
        self._counted: dict[str, float] | None = None
        self._loads = 0

    def take(self) -> None:
        """Take a sample."""
        counters, loads = self._replica.counters(), self._replica.durations()["load_seconds"]
        counted = {name: counters.get(name, 0) for name in _COUNTED}
        before = counted if self._counted is None else self._counted
        took = loads.since(self._loads) if self._counted is not None else ()
        self._counted, self._loads = counted, loads.count
        _, phases = self._replica.notable()
        residency = self._replica.residency()
        self._number += 1
        sample: Sample = (
            round(time.time()),
            len(residency),
            sum(phases.get(phase, 0) for phase in UNDER_WAY),
            phases.get(Phase.FAILED, 0),
            sum(held["in_flight"] for held in residency.values()),
            *(max(0, counted[name] - before[name]) for name in _COUNTED),
            round(median(took), 4) if took else None,
            round(max(took), 4) if took else None,
        )
        self.samples.append((self._number, sample))

    def after(self, number: int) -> list[Sample]:
        """The samples after that one."""
        return [sample for at, sample in self.samples if at > number]

    @property
    def last(self) -> int:
        """The number of the newest sample."""
        return self._number
