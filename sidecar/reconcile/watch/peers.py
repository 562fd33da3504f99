"""The other replicas of the same scopes that live, and what each has loaded, by their status files.

A replica lives while its file changes: nobody compares the clocks of two machines. An unreadable file changes
nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from lora_fs.sidecar.concurrency import Daemons
from lora_fs.sidecar.errors import LoraFsError
from lora_fs.sidecar.logs import event
from lora_fs.sidecar.model import Phase
from lora_fs.sidecar.reconcile.watch.reports import Reports
from lora_fs.sidecar.registry.format.layout import Layout

LOOK_S: Final = 2.0
READ_S: Final = 10.0
SILENT_S: Final = 35.0  # three heartbeats, and a mount that lags
STARTS_S: Final = 300.0  # a replica whose engine does not answer counts for so long: it may load its model

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Known:
    changed_at: float
    served_at: float
    loaded: frozenset[str]


class Peers:
    """``own``: this replica's id.

    Args:
        namespaces: served here. A replica that serves others is no home: it names and loads other adapters.

    Attributes:
        living: the adapters that each other replica has loaded.
        is_known: whether every report was read once: before that no replica counts as alone.
    """

    def __init__(
        self,
        layout: Layout,
        own: str,
        model: str,
        namespaces: Iterable[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._reports, self._own, self._clock = Reports(layout), own, clock
        self._serves = model, frozenset(namespaces)
        self._known: dict[str, _Known] = {}
        self._threads = Daemons(1, "lora-fs-peers")
        self._problem = ""
        self.living: Mapping[str, frozenset[str]] = {}
        self.is_known = False

    async def watch(self, on_change: Callable[[], None]) -> None:
        """Look every ``LOOK_S`` until cancelled; say when ``living`` changed."""
        while True:
            before, was_known = self.living, self.is_known
            try:
                async with asyncio.timeout(READ_S):
                    await self._threads.run(self.look)
                self._problem = ""
            except (LoraFsError, OSError, TimeoutError) as error:
                if not self._problem:
                    why = str(error) or type(error).__name__
                    told = event("placement.replicas_unknown")
                    logger.warning("the other replicas' status files are not read: %s", why, extra=told)
                self._problem = "unread"
            if self.living != before or self.is_known != was_known:
                self._tell(before)
                on_change()
            await asyncio.sleep(LOOK_S)

    def look(self) -> None:
        """Read what changed. Blocking.

        Raises:
            VolumeUnavailable: the volume does not list the reports.
        """
        look, now = self._reports.look(self._own), self._clock()
        for replica, status in look.changed.items():
            if (status.model, frozenset(status.namespaces)) != self._serves:
                self._known.pop(replica, None)
                continue
            known = self._known.get(replica)
            served_at = now if known is None or status.engine == "ready" else known.served_at
            ready = (name for name, one in status.adapters.items() if one.phase is Phase.READY)
            self._known[replica] = _Known(now, served_at, frozenset(ready))
        for replica in look.gone:
            self._known.pop(replica, None)
        self.living = {
            replica: one.loaded
            for replica, one in self._known.items()
            if now - one.changed_at < SILENT_S and now - one.served_at < STARTS_S
        }
        self.is_known |= look.is_whole

    def _tell(self, before: Mapping[str, frozenset[str]]) -> None:
        for replica in sorted(self.living.keys() ^ before.keys()):
            counts = replica in self.living
            what = "counts as" if counts else "does not count any more as"
            told = event("placement.replica_counts" if counts else "placement.replica_gone", peer=replica)
            logger.info("replica %s %s a home of eager adapters", replica, what, extra=told)
