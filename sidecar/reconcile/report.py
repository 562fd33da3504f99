"""This replica's status file on the volume: what it observes, for ``status`` and ``--wait``.

A hint, replaced whole when something changed and at every heartbeat. A volume that refuses or
hangs keeps at most one write waiting.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
import time

import anyio
import anyio.to_thread

from lora_fs.sidecar.errors import LoraFsError
from lora_fs.sidecar.model import ReplicaStatus
from lora_fs.sidecar.reconcile.replica import Replica
from lora_fs.sidecar.reconcile.volume import Volume
from lora_fs.sidecar.registry import atomic
from lora_fs.sidecar.registry.codec import seal
from lora_fs.sidecar.registry.store import Registry

logger = logging.getLogger(__name__)

HEARTBEAT_S = 10.0
GATHER_S = 0.1
WITHDRAW_S = 5.0


class Reporter:
    """Writes ``.replicas/<replica>.json``. ``url``: where other hosts reach this sidecar."""

    def __init__(self, registry: Registry, volume: Volume, url: str | None) -> None:
        self._registry, self._volume, self._url = registry, volume, url
        self._heartbeat = 0
        self._written: object = None
        self._written_at = 0.0
        self._task: asyncio.Task[None] | None = None

    def report(self, replica: Replica) -> None:
        """Write soon, if anything changed or the heartbeat is due."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._report(replica), name="status file")

    async def _report(self, replica: Replica) -> None:
        await asyncio.sleep(GATHER_S)  # gathers the changes of one pass into one write
        told, counts = replica.notable()
        readiness, recent = replica.readiness(), self._volume.recent
        content = (told, counts, readiness, recent)
        now = time.monotonic()
        if content == self._written and now - self._written_at < HEARTBEAT_S:
            return
        self._heartbeat += 1
        status = ReplicaStatus(
            replica=replica.replica_id,
            model=replica.model,
            namespaces=replica.namespaces,
            url=self._url,
            engine="ready" if readiness.ready else "unknown",
            heartbeat=self._heartbeat,
            updated_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            counts=dict(counts),
            adapters=dict(told),
            recent=dict(recent),
            conditions=readiness.conditions,
        )
        path = self._registry.layout.replica(replica.replica_id)
        try:
            await anyio.to_thread.run_sync(atomic.replace, path, seal(status), abandon_on_cancel=True)
        except LoraFsError as error:
            self._volume.status_problem = str(error)
            return
        self._volume.status_problem = None
        self._written, self._written_at = content, now

    async def withdraw(self, replica_id: str) -> None:
        """Remove the status file at shutdown: this replica is no more. Bounded."""
        if self._task is not None:
            self._task.cancel()
        path = self._registry.layout.replica(replica_id)

        def remove() -> None:
            path.unlink(missing_ok=True)
            self._registry.close()

        try:
            with anyio.fail_after(WITHDRAW_S):
                await anyio.to_thread.run_sync(remove, abandon_on_cancel=True)
        except TimeoutError:
            logger.warning("the status file is not removed: the volume does not answer")
        except OSError as error:
            logger.warning("the status file is not removed: %s", error)
