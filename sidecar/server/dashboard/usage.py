"""How the fleet uses each adapter: the replicas' counts, summed. Pure: no I/O.

A replica's counts begin at its start, and go with its report. A silent replica's last counts stay: what it
served, it served.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from lora_fs.sidecar.model import AdapterKey, AdapterStatus, ReplicaStatus, RevisionUsage
from lora_fs.sidecar.reconcile.catalog import public_name

EVERY_S: Final = 5.0  # each sum that is another one is a row that is sent


class Totals(NamedTuple):
    """Counts of one adapter, or of one of its revisions, on several replicas."""

    requests: int = 0
    errors_4xx: int = 0
    errors_5xx: int = 0
    loads: int = 0
    load_s: float = 0.0

    def plus(self, more: RevisionUsage) -> Totals:
        """Return the sum."""
        return Totals(
            self.requests + more.requests,
            self.errors_4xx + more.errors_4xx,
            self.errors_5xx + more.errors_5xx,
            self.loads + more.loads,
            self.load_s + more.load_seconds,
        )

    @property
    def errors(self) -> int:
        """Requests that got an error."""
        return self.errors_4xx + self.errors_5xx

    @property
    def mean_load_s(self) -> float | None:
        """Seconds of a load by the engine, on average; None before the first."""
        return round(self.load_s / self.loads, 4) if self.loads else None


class FleetUsage:
    """The counts of all replicas by public name, summed at most every ``EVERY_S``."""

    def __init__(self) -> None:
        self._summed_at = float("-inf")
        self._reports: dict[str, Mapping[str, RevisionUsage]] = {}

    def note(self, status: ReplicaStatus) -> None:
        """Take over what a replica reports."""
        self._reports[status.replica] = status.usage

    def drop(self, replica: str) -> None:
        """Forget a replica whose report is gone."""
        self._reports.pop(replica, None)

    def sums(self, model: str, namespaces: tuple[str, ...]) -> dict[str, Totals] | None:
        """Return the sum of each adapter that some replica has counts of; None if it is too early."""
        now = time.monotonic()
        if now - self._summed_at < EVERY_S:
            return None
        self._summed_at = now
        found: dict[str, Totals] = {}
        for report in self._reports.values():
            for key, usage in _keyed(report):
                if key.model == model and key.namespace in namespaces:
                    name = public_name(key.scope, key.name, namespaces)
                    found[name] = found.get(name, Totals()).plus(usage)
        return found


@dataclass(frozen=True, slots=True)
class Said:
    """One replica's report of one adapter.

    Attributes:
        status: None if the adapter is unloaded there.
        usage: by revision.
        whole: its report has room for all its counts.
    """

    status: AdapterStatus | None = None
    usage: Mapping[str, RevisionUsage] = field(default_factory=dict)
    whole: bool = True


def said_of(status: ReplicaStatus, namespace: str, model: str, name: str) -> Said:
    """Find in a report what concerns one adapter. A canary's status is not the name's."""
    of_name = (
        one
        for reported_as, one in status.adapters.items()
        if "@" not in reported_as and (one.key[0], one.key[1], one.key[3]) == (namespace, model, name)
    )
    usage = {
        key.revision: counts
        for key, counts in _keyed(status.usage)
        if (key.namespace, key.model, key.name) == (namespace, model, name)
    }
    return Said(next(of_name, None), usage, status.usage_left_out == 0 or status.model != model)


def totals_of(said: Iterable[Said]) -> tuple[dict[str, Totals], bool]:
    """Sum by revision, and whether no replica left any count out."""
    found: dict[str, Totals] = {}
    whole = True
    for one in said:
        whole &= one.whole
        for revision, usage in one.usage.items():
            found[revision] = found.get(revision, Totals()).plus(usage)
    return found, whole


def _keyed(usage: Mapping[str, RevisionUsage]) -> Iterator[tuple[AdapterKey, RevisionUsage]]:
    for text, counts in usage.items():
        parts = text.split("/")
        if len(parts) == len(AdapterKey._fields):
            yield AdapterKey(*parts), counts
