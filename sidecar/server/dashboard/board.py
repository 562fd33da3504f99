"""What the dashboard shows, kept while somebody looks and rendered once a change, in threads.

The event loop collects what this replica has in memory; a thread reads the other replicas' reports,
compares and renders. Whoever waits for a change gets the same bytes. After ``IDLE_S`` without a
caller nothing is read any more.
"""

from __future__ import annotations

import asyncio
import gzip
import logging
import math
import secrets
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import anyio
import anyio.to_thread

from lora_fs.sidecar.concurrency import Threads
from lora_fs.sidecar.errors import TemporaryError, VolumeUnavailable
from lora_fs.sidecar.logs import event
from lora_fs.sidecar.model import ReplicaStatus
from lora_fs.sidecar.reconcile.catalog import Catalog
from lora_fs.sidecar.server.dashboard.columns import column_of, row_of, summary_of
from lora_fs.sidecar.server.dashboard.fleet import Fleet, Look
from lora_fs.sidecar.server.dashboard.grid import Grid
from lora_fs.sidecar.server.dashboard.history import EVERY_S, History, Sample
from lora_fs.sidecar.server.dashboard.usage import FleetUsage, Said, said_of
from lora_fs.sidecar.server.middleware.access import ALL, Sight
from lora_fs.sidecar.server.ports import ReplicaPort, Served
from lora_fs.sidecar.server.routes.listing import around
from lora_fs.sidecar.server.routes.render_cache import RenderCache

logger = logging.getLogger(__name__)

PERIOD_S: Final = 0.5
IDLE_S: Final = 60.0
LOOK_S: Final = 10.0  # if the volume is silent for longer, report it and keep the last look
MAX_WAIT_S: Final = 25.0
MAX_RENDERED: Final = 32
READS: Final = 4  # of reports, at once


@dataclass(frozen=True, slots=True)
class Since:
    """A caller's state: the process, its version, and the last sample of the history."""

    epoch: str = ""
    version: int = 0
    sample: int = 0

    @classmethod
    def parse(cls, text: str) -> Since:
        """``epoch.version.sample`` as an answer gave it; anything else is nothing."""
        epoch, *numbers = text.split(".")
        if len(numbers) != 2 or not all(one.isdecimal() and len(one) < 16 for one in numbers):
            return cls()
        return cls(epoch, int(numbers[0]), int(numbers[1]))


class Board:
    """``fleet`` None: there is no volume to read the other replicas' reports from.

    Args:
        most_wait_s: how long an answer waits for news at the most.
    """

    def __init__(self, replica: ReplicaPort, fleet: Fleet | None, *, most_wait_s: float = MAX_WAIT_S) -> None:
        self._replica, self._fleet, self._most_wait_s = replica, fleet, most_wait_s
        self._history = History(replica)
        self._epoch, self._version = secrets.token_hex(4), 0
        self._asked_at = float("-inf")
        self._ends = False
        self._asked, self._news = asyncio.Event(), asyncio.Event()
        self._threads = anyio.CapacityLimiter(2)
        self._reads = Threads(READS)
        self._reading: asyncio.Task[Look] | None = None
        # What threads read and write, under the lock:
        self._lock = threading.Lock()
        self._grid = Grid()
        self._rows = RenderCache(row_of)
        self._usage = FleetUsage()
        self._reports: dict[str, ReplicaStatus] = {}  # without their adapters and their counts
        self._summaries: dict[str, tuple[int, dict[str, Any]]] = {}  # replica → as of which version, what
        self._problem: str | None = None
        self._rendered: dict[tuple[Since, Sight, bool, int], bytes] = {}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Sample, and look while somebody does."""
        tasks: list[asyncio.Task[Any]] = [
            asyncio.create_task(one(), name="dashboard") for one in (self._sample, self._follow)
        ]
        try:
            yield
        finally:
            tasks += [self._reading] if self._reading is not None else []
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def answer(self, since: Since, sight: Sight, wait_s: float, *, known: bool = False) -> bytes | None:
        """Return the changes since then, as gzipped JSON; None if there was none in ``wait_s``.

        Args:
            known: the caller showed a token of the file.
        """
        self._asked_at = time.monotonic()
        self._asked.set()
        with anyio.move_on_after(max(0.0, min(wait_s, self._most_wait_s))):
            while not self._has_news(since) and not self._ends:
                await self._news.wait()
        if not self._has_news(since):
            return None
        history = self._history.after(since.sample if since.epoch == self._epoch else 0)
        render = partial(self._render, since, sight, known, history, self._history.last)
        return await anyio.to_thread.run_sync(render, limiter=self._threads)

    def end(self) -> None:
        """Let nobody wait any more: the server is to end."""
        self._ends = True
        self._tell()

    async def described(self, served: Served) -> dict[str, Said]:
        """Each replica's report of an adapter now, this one's from memory."""
        key = (served.record.namespace, served.record.model, served.record.name)
        own = {self._replica.replica_id: said_of(self._own(), *key)}
        if self._fleet is None:
            return own
        read = partial(self._fleet.of, self._replica.replica_id, key)
        try:
            return await self._reads.run(read, LOOK_S) | own
        except TimeoutError as error:
            raise VolumeUnavailable(f"the replicas' reports were not read in {LOOK_S:.0f} s") from error

    def _has_news(self, since: Since) -> bool:
        now = Since(self._epoch, self._version, self._history.last)
        return self._version > 0 and since != now

    # -- looking -------------------------------------------------------------------------------

    async def _sample(self) -> None:
        while True:
            try:
                self._history.take()
                self._tell()
            except TemporaryError:
                pass  # the plugin's replica is made later than its routes
            except Exception:
                logger.exception("the dashboard missed a sample", extra=event("dashboard.failed"))
            await asyncio.sleep(EVERY_S)

    async def _follow(self) -> None:
        while True:
            if time.monotonic() - self._asked_at > IDLE_S:
                self._asked.clear()
                await self._asked.wait()
            try:
                await self._look()
            except TemporaryError as error:
                logger.debug("the dashboard waits: %s", error, extra=event("dashboard.waits"))
            except Exception:
                logger.exception("the dashboard missed a look", extra=event("dashboard.failed"))
            await asyncio.sleep(PERIOD_S)

    async def _look(self) -> None:
        """Collect here, read and compare in a thread."""
        catalog, own = self._replica.catalog(), self._own()
        seen, problem = await self._others()
        apply = partial(self._apply, catalog, own, seen, problem)
        if await anyio.to_thread.run_sync(apply, limiter=self._threads):
            self._tell()

    def _own(self) -> ReplicaStatus:
        """This replica's own report, as of now."""
        replica, readiness, usage = self._replica, self._replica.readiness(), self._replica.usage()
        return ReplicaStatus(
            replica=replica.replica_id,
            model=replica.model,
            namespaces=replica.namespaces,
            engine="ready" if readiness.ready else "unknown",
            adapters=dict(replica.notable()[0]),
            conditions=readiness.conditions,
            conditions_since=dict(readiness.since),
            figures=dict(replica.figures()),
            usage={str(key): counts for key, counts in usage.revisions.items()},
            usage_left_out=usage.left_out,
            downloads=dict(replica.downloads()),
        )

    async def _others(self) -> tuple[Look, str | None]:
        """The other replicas' reports, and why there are none. Later calls wait for a hung look."""
        if self._fleet is None:
            return Look(), None
        wait_s = 0.0
        if self._reading is None:
            look = partial(self._fleet.look, self._replica.replica_id)
            reads = self._reads.run(look, math.inf)
            self._reading, wait_s = asyncio.create_task(reads, name="dashboard reads"), LOOK_S
        done, _ = await asyncio.wait({self._reading}, timeout=wait_s)
        if not done:
            return Look(), "other replicas are shown as last seen: the volume does not answer"
        reading, self._reading = self._reading, None
        try:
            return reading.result(), None
        except VolumeUnavailable as error:
            return Look(), f"other replicas are shown as last seen: {error}"

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    # -- in a thread ---------------------------------------------------------------------------

    def _apply(self, catalog: Catalog, own: ReplicaStatus, seen: Look, problem: str | None) -> bool:
        """Take over the look as the next version; False if it changes nothing."""
        version = self._version + 1
        with self._lock:
            rows = self._rows.of(catalog.served)
            columns, gone = {}, set(seen.gone)
            for status in (*seen.changed.values(), own):
                if status.model == own.model and set(status.namespaces) & set(own.namespaces):
                    columns[status.replica] = column_of(status, own.namespaces, rows)
                    self._usage.note(status)
                    bare = status.model_copy(update={"adapters": {}, "usage": {}})
                    self._reports[status.replica] = bare
                else:
                    gone.add(status.replica)
            for replica in gone:
                self._reports.pop(replica, None)
                self._summaries.pop(replica, None)
                self._usage.drop(replica)
            differs = self._grid.update(version, rows, columns, frozenset(gone))
            sums = self._usage.sums(own.model, own.namespaces)
            differs |= sums is not None and self._grid.use(sums)
            differs |= self._summarise(version, own.replica)
            told = problem or next((f"{r}: {why}" for r, why in seen.unreadable.items()), None)
            differs |= told != self._problem
            self._problem = told
            if differs:
                self._version = version
                self._rendered.clear()
            return differs

    def _summarise(self, version: int, own: str) -> bool:
        now, differs = time.time(), False
        for replica, status in self._reports.items():
            summary = summary_of(status, now, own=replica == own)
            if replica not in self._summaries or self._summaries[replica][1] != summary:
                self._summaries[replica] = (version, summary)
                differs = True
        return differs

    def _render(self, since: Since, sight: Sight, known: bool, history: list[Sample], last: int) -> bytes:
        with self._lock:
            key = (since, sight, known, last)
            if key not in self._rendered:
                if len(self._rendered) >= MAX_RENDERED:
                    self._rendered.clear()
                self._rendered[key] = gzip.compress(self._text(since, sight, known, history, last), 1)
            return self._rendered[key]

    def _text(self, since: Since, sight: Sight, known: bool, history: list[Sample], last: int) -> bytes:
        full = since.epoch != self._epoch or since.version < self._grid.floor
        after = -1 if full else since.version
        replicas = {r: told for r, (version, told) in self._summaries.items() if version > after}
        if sight != ALL:
            replicas = {replica: _within(sight, summary) for replica, summary in replicas.items()}
        told = {
            "since": f"{self._epoch}.{self._version}.{last}",
            "full": full,
            "replica": self._replica.replica_id,
            "model": self._replica.model,
            "limited": sight != ALL,
            "known": known,
            "problem": self._problem if sight == ALL else self._problem and "not everything could be read",
            "columns": self._grid.replicas,
            "replicas": replicas,
            "gone": [name for space, name in self._grid.gone(after) if space in sight],
            "history": history if sight == ALL else [],  # counts of every namespace
        }
        rows = (row for space, row in self._grid.rows(after) if space in sight)
        return around(rows, told, "rows")


def _within(sight: Sight, summary: dict[str, Any]) -> dict[str, Any]:
    """Keep of a replica what names nothing that is not theirs: the kinds of its conditions, and no counts."""
    kinds = [one.partition(":")[0] for one in summary["conditions"]]
    downloads = [one for one in summary["downloads"] if one["namespace"] in sight]
    return {**summary, "conditions": kinds, "downloads": downloads, "figures": {}}
