"""Counts each revision's requests, errors and loads on this replica. In memory, bounded. No I/O.

It counts at most ``KEPT`` revisions, and forgets the one longest unused first, with its counts. The next pass
forgets a revision that no name serves any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from heapq import nlargest
from itertools import islice
from typing import Final, NamedTuple

from lora_fs.sidecar.model import AdapterKey, RevisionUsage

KEPT: Final = 4096
REPORTED: Final = 512  # revisions in a status file, and with series in a scrape
CLIENT_LEFT: Final = 499


@dataclass(slots=True)
class _Counts:
    requests: int = 0
    errors_4xx: int = 0
    errors_5xx: int = 0
    loads: int = 0
    load_s: float = 0.0
    reported: RevisionUsage | None = None  # the last report's; None once a count changed


class UsageReport(NamedTuple):
    """The counts of some revisions, and how many more have counts."""

    revisions: Mapping[AdapterKey, RevisionUsage]
    left_out: int = 0


class UsageCounters:
    """Lives on the event loop."""

    def __init__(self) -> None:
        self._counts: dict[AdapterKey, _Counts] = {}  # the one used longest ago is first
        self._new: set[AdapterKey] = set()  # since the last ``keep_only``

    def asked(self, key: AdapterKey) -> None:
        """Count a request that is sent to a revision."""
        self._of(key).requests += 1

    def answered(self, key: AdapterKey, status: int) -> None:
        """Count an answer by its HTTP status. A client that left before it (499) is no error."""
        if 400 <= status < 500 and status != CLIENT_LEFT:
            self._of(key).errors_4xx += 1
        elif status >= 500:
            self._of(key).errors_5xx += 1

    def loaded(self, key: AdapterKey, seconds: float) -> None:
        """Count a load by the engine that succeeded."""
        counts = self._of(key)
        counts.loads += 1
        counts.load_s += seconds

    def report(self, first: Iterable[AdapterKey] = (), most: int = REPORTED) -> UsageReport:
        """Return the counts of ``first``, were they 0, then of the revisions with the most requests."""
        named = dict.fromkeys(islice(dict.fromkeys(first), most))
        others = [key for key in self._counts if key not in named]
        chosen = nlargest(most - len(named), others, key=lambda key: self._counts[key].requests)
        none = _Counts()
        found = {key: _usage(self._counts.get(key, none)) for key in (*named, *chosen)}
        return UsageReport(found, len(others) - len(chosen))

    def keep_only(self, is_served: Callable[[AdapterKey], bool], changed: Iterable[AdapterKey]) -> None:
        """Forget revisions that are no longer served, among those ``changed`` and those just counted."""
        new, self._new = self._new, set()
        for key in new.union(changed):
            if not is_served(key):
                self._counts.pop(key, None)

    def _of(self, key: AdapterKey) -> _Counts:
        counts = self._counts.pop(key, None)
        if counts is None:
            counts = _Counts()
            self._new.add(key)
            if len(self._counts) >= KEPT:
                del self._counts[next(iter(self._counts))]
        self._counts[key] = counts
        counts.reported = None
        return counts


def _usage(counts: _Counts) -> RevisionUsage:
    if counts.reported is None:
        counts.reported = RevisionUsage(
            requests=counts.requests,
            errors_4xx=counts.errors_4xx,
            errors_5xx=counts.errors_5xx,
            loads=counts.loads,
            load_seconds=round(counts.load_s, 4),
        )
    return counts.reported
