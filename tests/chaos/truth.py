"""Which answers could be right at a moment, from what was asked for and what was acknowledged. Pure.

Owns no process and no clock: times come in, in seconds on one monotonic clock. A change under way may have
happened or not, so that both answers are right. One that failed may have happened as well, until the next
one of that name is acknowledged. After an acknowledgement the old answer is right for a grace period.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass

ABSENT = "absent"


@dataclass(slots=True)
class Span:
    """What could be right from ``since`` until ``until``."""

    since: float
    until: float
    may: frozenset[str]


class Truth:
    """Of each name: weights by their label, or ``ABSENT``. Any thread may ask.

    Args:
        grace_s: an old answer is right for so long after a change was acknowledged.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._spans: dict[str, list[Span]] = defaultdict(
            lambda: [Span(-math.inf, math.inf, frozenset({ABSENT}))]
        )
        self._guard = threading.Lock()

    def begin(self, name: str, may: Collection[str], now: float) -> None:
        """A change to ``may`` is asked for: from now on that could be right, too."""
        with self._guard:
            self._spans[name].append(Span(now, math.inf, frozenset(may)))

    def acknowledge(self, name: str, now: float) -> None:
        """The last change of ``name`` has happened: what was before it is right for the grace period."""
        with self._guard:
            for span in self._spans[name][:-1]:
                span.until = min(span.until, now + self._grace_s)

    def could_be(self, name: str, since: float, until: float) -> frozenset[str]:
        """What a request of that time may have been answered with."""
        with self._guard:
            spans = [s for s in self._spans[name] if s.since <= until and since <= s.until]
        return frozenset().union(*(span.may for span in spans))

    def age_s(self, name: str, answer: str, since: float) -> float:
        """For how long ``answer`` had not been right any more when a request began; 0 where it still was."""
        with self._guard:
            ends = [s.until - self._grace_s for s in self._spans[name] if answer in s.may]
        return max(0.0, since - max(ends, default=since))
