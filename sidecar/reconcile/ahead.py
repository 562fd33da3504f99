"""Stages what is registered while the replica runs, before anyone asks for it.

One adapter at a time, into free room only: nothing makes way for it. What was there when the
replica started is staged when it is asked for, so that a fleet that starts does not read the
whole volume. A copy that fails is left to the request that needs it, which is told why.
"""

from __future__ import annotations

import asyncio
import logging

from lora_fs.sidecar.errors import LoraFsError
from lora_fs.sidecar.model import Record
from lora_fs.sidecar.reconcile.catalog import Catalog
from lora_fs.sidecar.reconcile.staging import Stager

logger = logging.getLogger(__name__)


class Ahead:
    """Lives on the event loop; copies in the stager's threads."""

    def __init__(self, stager: Stager) -> None:
        self._stager = stager
        self._seen: frozenset[str] | None = None  # digests
        self._catalog: Catalog | None = None
        self._queue: list[Record] = []
        self._task: asyncio.Task[None] | None = None

    def look(self, catalog: Catalog) -> None:
        """Queue what is new in ``catalog``; the first one tells what was there before."""
        if catalog is self._catalog:
            return
        served = {one.record.spec.digest: one.record for one in catalog.served.values()}
        if self._seen is not None:
            self._queue += [record for digest, record in served.items() if digest not in self._seen]
        self._seen, self._catalog = frozenset(served), catalog
        if self._queue and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._run(), name="stage ahead")

    async def _run(self) -> None:
        while self._queue:
            record = self._queue.pop(0)
            if self._seen is None or record.spec.digest not in self._seen or self._stager.has(record):
                continue
            try:
                await self._stager.stage(record, make_room=False)
            except LoraFsError as error:
                logger.info("%s is not staged ahead: %s", record.key, error)
