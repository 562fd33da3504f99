"""Stages adapters before anyone asks for them.

One at a time, into free room only: nothing makes way for it. Unless ``all`` is set, a request stages what was
there when the replica started: a fleet that starts would read the whole volume. If a copy fails, the request
that needs it makes it, and gets the reason.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque

from lora_fs.sidecar.errors import LoraFsError
from lora_fs.sidecar.logs import event
from lora_fs.sidecar.reconcile.catalog import Catalog, Served
from lora_fs.sidecar.reconcile.stage.disk_errors import StageFull
from lora_fs.sidecar.reconcile.stage.jobs import Stager
from lora_fs.sidecar.registry.view.snapshot import touched

logger = logging.getLogger(__name__)


class Ahead:
    """Lives on the event loop; copies in the stager's threads. ``everything``: what was there, too."""

    def __init__(self, stager: Stager, *, everything: bool = False) -> None:
        self._stager = stager
        self._catalog: Catalog | None = Catalog() if everything else None
        self._queue: deque[Served] = deque()
        self._task: asyncio.Task[None] | None = None

    def look(self, catalog: Catalog) -> None:
        """Queue what is new in ``catalog``; the first one tells what was there before."""
        before, self._catalog = self._catalog, catalog
        if before is not None and before is not catalog:
            new = (catalog.served.get(name) for name in touched(before.served, catalog.served))
            self._queue.extend(served for served in new if served is not None and not _has(before, served))
        if self._queue and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._run(), name="stage ahead")

    async def _run(self) -> None:
        while self._queue:
            served = self._queue.popleft()
            record = served.record
            if self._catalog is None or not _has(self._catalog, served) or self._stager.has(record):
                continue
            try:
                await self._stager.stage(record, make_room=False)
            except StageFull as error:
                size = record.spec.size_bytes
                self._queue = deque(one for one in self._queue if one.record.spec.size_bytes < size)
                told = event("stage_ahead.full", adapter=str(record.key), size_bytes=size)
                logger.info(
                    "%s, and what is as large, is not staged ahead: %s", record.key, error, extra=told
                )
            except LoraFsError as error:
                told = event("stage_ahead.failed", adapter=str(record.key), error=type(error).__name__)
                logger.info("%s is not staged ahead: %s", record.key, error, extra=told)


def _has(catalog: Catalog, served: Served) -> bool:
    """Whether its name serves these bytes in ``catalog``, too."""
    known = catalog.served.get(served.name)
    return known is not None and known.record.spec.digest == served.record.spec.digest
