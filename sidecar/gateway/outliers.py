"""Which replicas fail what others serve: they get no requests for a while. Decides alone, without I/O.

As Envoy's outlier detection does, it ejects a replica whose last FAILURES answers all failed. The replica is
back after BASE_S, the next time after twice BASE_S, then after three times. It ejects a third of the fleet at
most, or one of two, and never the only replica: a request that no engine can serve takes no fleet down.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

FAILURES: Final = 5  # one after another, with no request served between them
BASE_S: Final = 30.0  # that the first ejection lasts; the n-th lasts n times as long
MAX_S: Final = 300.0
PART: Final = 3  # eject at most one in so many


class Outcome(Enum):
    """The verdict of an answer on its replica.

    Attributes:
        SERVED: it works.
        FAILED: it does not.
        NEITHER: the request was at fault, or the replica says why it does not serve now.
    """

    SERVED = auto()
    FAILED = auto()
    NEITHER = auto()


def outcome(status: int, *, has_reason: bool) -> Outcome:
    """Return what an answer says of its replica.

    Args:
        status: of HTTP.
        has_reason: it says when to ask again, or which of lora-fs's errors it is.
    """
    if status < 400:
        return Outcome.SERVED
    if status < 500 or status == 501 or (status == 503 and has_reason):
        return Outcome.NEITHER
    return Outcome.FAILED


@dataclass(slots=True)
class _Record:
    failures: int = 0  # since it served last
    times: int = 0  # ejections; less after good times
    back_at: float = 0.0


class Outliers:
    """The failures of each replica, and the ejected ones with their ends."""

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}

    def answered(self, replica: str, told: Outcome, fleet: Collection[str], now: float) -> float | None:
        """Count an answer. Return for how many seconds it ejects the replica; None: it does not.

        Args:
            fleet: the ready replicas, this one among them.
            now: seconds, on a clock that never goes back.
        """
        if told is Outcome.SERVED and replica in self._records:
            self._records[replica].failures = 0
        if told is not Outcome.FAILED or replica not in fleet:
            return None
        record = self._records.setdefault(replica, _Record())
        if now < record.back_at:
            return None  # it had the request before
        record.failures += 1
        if record.failures < FAILURES or len(self.ejected(fleet, now)) >= _most(fleet):
            return None
        good_s = now - record.back_at
        record.times = max(0, record.times - int(good_s / BASE_S)) + 1
        seconds = min(MAX_S, BASE_S * record.times)
        record.failures, record.back_at = 0, now + seconds
        return seconds

    def ejected(self, fleet: Collection[str], now: float) -> Mapping[str, float]:
        """Return which replicas of ``fleet`` get no requests now, and for how many seconds more."""
        left = {
            one: at.back_at - now for one, at in self._records.items() if at.back_at > now and one in fleet
        }
        most = _most(fleet)
        if len(left) > most:  # the fleet became smaller
            longest = sorted(left, key=lambda one: (-left[one], one))[:most]
            return {one: left[one] for one in longest}
        return left

    def forget(self, replica: str) -> None:
        """Forget a replica that left or restarted."""
        self._records.pop(replica, None)


def _most(fleet: Collection[str]) -> int:
    """Return how many replicas of a fleet it may eject."""
    return 0 if len(fleet) < 2 else max(1, len(fleet) // PART)
