"""What the replicas of one registry report on the volume, read again only where it changed. Blocking.

A report is a hint. If one is unreadable, a look says why, and the replica's last one stays in force.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from lora_fs.sidecar.errors import CorruptRecord, TemporaryError
from lora_fs.sidecar.model import ReplicaStatus
from lora_fs.sidecar.registry.format.layout import Layout
from lora_fs.sidecar.registry.format.sealed import decode
from lora_fs.sidecar.registry.volume import atomic
from lora_fs.sidecar.registry.volume.folders import listed

MAX_READ = 1000  # of one look, reports of all models together
MAX_REPLICAS = 10 * MAX_READ  # with more, who lives would be read too seldom to count as living


@dataclass(frozen=True, slots=True)
class Look:
    """One look: the reports that are new or changed, whose are gone, and which cannot be read.

    ``is_whole``: this look and those before it came to every report.
    """

    changed: Mapping[str, ReplicaStatus] = field(default_factory=dict)
    gone: frozenset[str] = frozenset()
    unreadable: Mapping[str, str] = field(default_factory=dict)
    is_whole: bool = True


class Reports:
    """The reports in ``.replicas``. One thread at a time."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._seen: dict[str, bytes] = {}  # replica → the digest of what was read
        self._next = 0  # of the names, where the next look begins
        self._looked = 0  # at so many reports

    def look(self, own: str) -> Look:
        """Read all but the report of the replica ``own``.

        Reads at most MAX_READ reports. If there are more, the next look goes on behind them.

        Raises:
            VolumeUnavailable: the volume does not list the reports, so none is known to be gone.
        """
        changed, unreadable = {}, {}
        names = self.names(own)
        start = self._next % max(1, len(names))
        turn = (names[start:] + names[:start])[:MAX_READ]
        self._next = start + len(turn)
        self._looked += len(turn)
        for replica in turn:
            try:
                data = atomic.read_bytes(self._layout.replica(replica))
                if data is None:
                    continue  # removed meanwhile: the next look finds it gone
                digest = hashlib.blake2b(data, digest_size=16).digest()
                if self._seen.get(replica) == digest:
                    continue
                changed[replica] = decode(ReplicaStatus, data)
                self._seen[replica] = digest
            except (CorruptRecord, TemporaryError) as error:
                unreadable[replica] = str(error)
        gone = frozenset(self._seen.keys() - names)
        for replica in gone:
            del self._seen[replica]
        return Look(changed, gone, unreadable, self._looked >= len(names))

    def names(self, own: str) -> list[str]:
        """Return the replicas that report, but for ``own``, at most MAX_REPLICAS. Raises as ``look``."""
        names = listed(self._layout.replicas, root=self._layout.root) or ()
        replicas = (name.removesuffix(".json") for name in names if name.endswith(".json"))
        return sorted(one for one in replicas if one != own and not one.startswith("."))[:MAX_REPLICAS]
