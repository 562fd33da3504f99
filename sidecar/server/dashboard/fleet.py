"""Every replica's report of one adapter, for the dashboard. Blocking."""

from __future__ import annotations

from lora_fs.sidecar.errors import CorruptRecord, TemporaryError
from lora_fs.sidecar.model import ReplicaStatus
from lora_fs.sidecar.reconcile.watch.reports import MAX_READ, Reports
from lora_fs.sidecar.reconcile.watch.reports import Look as Look
from lora_fs.sidecar.registry.format.sealed import decode
from lora_fs.sidecar.registry.volume import atomic
from lora_fs.sidecar.server.dashboard.usage import Said, said_of


class Fleet(Reports):
    """The reports, and what they say of one adapter."""

    def of(self, own: str, key: tuple[str, str, str]) -> dict[str, Said]:
        """Each replica's report of one adapter now: namespace, model and name.

        Reads MAX_READ at most; the next one stands for the rest.
        """
        names = self.names(own)
        found = {one: Said(whole=False) for one in names[MAX_READ : MAX_READ + 1]}
        for replica in names[:MAX_READ]:
            try:
                data = atomic.read_bytes(self._layout.replica(replica))
                if data is not None:
                    found[replica] = said_of(decode(ReplicaStatus, data), *key)
            except (CorruptRecord, TemporaryError):
                found[replica] = Said(whole=False)
        return found
