"""How long things took: cumulative counts for Prometheus, and the last few for people."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, islice
from statistics import median
from typing import Final

BOUNDS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
KEPT: Final = 256


class Durations:
    """Seconds that one kind of work took. Lives on the event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._last: deque[float] = deque(maxlen=KEPT)
        self.count = 0
        self.sum_s = 0.0

    def add(self, seconds: float) -> None:
        """Count one more."""
        self._counts[bisect_left(BOUNDS_S, seconds)] += 1
        self._last.append(seconds)
        self.count += 1
        self.sum_s += seconds

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Count the block, unless an error leaves it: that took as long as it took."""
        started = self._clock()
        yield
        self.add(self._clock() - started)

    def buckets(self) -> list[tuple[str, float]]:
        """Prometheus's: upper bound → how many took no longer."""
        bounds = [*(f"{bound:g}" for bound in BOUNDS_S), "+Inf"]
        return list(zip(bounds, map(float, accumulate(self._counts)), strict=True))

    def since(self, count: int) -> Sequence[float]:
        """The kept ones after the first ``count``."""
        new = min(self.count - count, len(self._last))
        return list(islice(reversed(self._last), new))

    def median_s(self) -> float | None:
        """The median of the kept ones; None if there is none."""
        return median(self._last) if self._last else None
