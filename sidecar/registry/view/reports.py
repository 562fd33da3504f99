"""Reads the replicas' own reports from the volume: their status and their events. Blocking.

A report is a hint. An unreadable report is neither fine nor absent: readers name it, with the reason.
"""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from lora_fs.sidecar.errors import CorruptRecord, TemporaryError
from lora_fs.sidecar.model import EventList, ReplicaStatus, Scope
from lora_fs.sidecar.registry.format.ids import written_at
from lora_fs.sidecar.registry.format.layout import Layout
from lora_fs.sidecar.registry.format.sealed import decode
from lora_fs.sidecar.registry.volume import atomic
from lora_fs.sidecar.registry.volume.folders import listed

LIVE_S = 60  # a replica that wrote no status for so long is stale

Written = TypeVar("Written", ReplicaStatus, EventList)


@dataclass(frozen=True, slots=True)
class Reports:
    """The replicas' reports, and the unreadable files.

    Attributes:
        unreadable: why, by replica. young: those of them less than LIVE_S old.
    """

    replicas: tuple[ReplicaStatus, ...]
    unreadable: Mapping[str, str]
    young: tuple[str, ...] = ()

    def of(self, scope: Scope) -> list[ReplicaStatus]:
        """The replicas that serve a scope."""
        return [r for r in self.replicas if r.model == scope.model and scope.namespace in r.namespaces]


@dataclass(frozen=True, slots=True)
class Happened:
    """Read every replica's last report, and why a file is unreadable."""

    lists: tuple[EventList, ...] = ()
    unreadable: Mapping[str, str] = field(default_factory=dict)


def read_reports(layout: Layout) -> Reports:
    """Read every status file.

    Raises:
        VolumeUnavailable: the volume does not list them, or the registry is gone.
    """
    names = listed(layout.replicas, root=layout.root)
    found, unreadable = _decoded(ReplicaStatus, layout.replicas, names)
    return Reports(found, unreadable, tuple(one for one in unreadable if _is_young(layout.replica(one))))


def age_s(status: ReplicaStatus) -> float:
    """Seconds since a replica last wrote, by the clocks of both; infinite if it does not say when."""
    return since_s(status.updated_at)


def since_s(written: str) -> float:
    """Seconds since a time in RFC 3339; infinite if it is none."""
    at = written_at(written)
    if at is None:
        return math.inf
    return max(0.0, (datetime.datetime.now(datetime.UTC) - at).total_seconds())


def read_events(layout: Layout) -> Happened:
    """Read every file of events.

    Raises:
        VolumeUnavailable: the volume does not list them.
    """
    return Happened(*_decoded(EventList, layout.events, atomic.list_names(layout.events)))


def _decoded(
    kind: type[Written], folder: Path, names: list[str] | None
) -> tuple[tuple[Written, ...], dict[str, str]]:
    found, unreadable = [], {}
    for name in sorted(names or ()):
        if not name.endswith(".json") or name.startswith("."):
            continue
        try:
            data = atomic.read_bytes(folder / name)
            if data is not None:
                found.append(decode(kind, data))
        except (CorruptRecord, TemporaryError) as error:
            unreadable[name.removesuffix(".json")] = str(error)
    return tuple(found), unreadable


def _is_young(file: Path) -> bool:
    try:
        return time.time() - file.lstat().st_mtime < LIVE_S
    except OSError:
        return False
