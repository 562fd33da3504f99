"""This replica's two files on the volume: what it observes, and what happened to it lately.

Hints, replaced whole: the status when something changed and at every heartbeat, which waits for no pass of
the replica; the events when there are new ones and at most every ``EVENTS_S``. While changes go on it writes
the status every ``EACH_S``: a volume may bill each write, and other replicas read it. It never writes to
another registry mounted in this one's place. A volume that refuses or hangs keeps at most one write waiting.
Heartbeats count from a random number: a file with another's heartbeat shows another process of this id.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import anyio

from lora_fs.sidecar.concurrency import Daemons
from lora_fs.sidecar.errors import CorruptRecord, LoraFsError, RegistryMissing
from lora_fs.sidecar.logs import event
from lora_fs.sidecar.model import ChangedBy, EventList, ReplicaStatus
from lora_fs.sidecar.reconcile.limits import limits_of
from lora_fs.sidecar.reconcile.replica import Replica
from lora_fs.sidecar.reconcile.status import bounded
from lora_fs.sidecar.reconcile.telemetry.events import utc_now
from lora_fs.sidecar.reconcile.watch.watcher import Volume
from lora_fs.sidecar.registry.format.sealed import seal, unseal
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.registry.volume import atomic
from lora_fs.sidecar.registry.volume.folders import make_folder
from lora_fs.sidecar.validate import Expectation

logger = logging.getLogger(__name__)

HEARTBEAT_S = 10.0
EVENTS_S = 5.0
GATHER_S = 0.1
EACH_S = 1.0  # a write; as many as ``AT_ONCE_S`` pays for may follow each other faster
AT_ONCE_S = 5.0
SHARED_S = 3 * HEARTBEAT_S  # for so long after its last write another process counts as living
WITHDRAW_S = 5.0
SHARED = (
    "another process writes {} as well, so that status and --wait see one of the two: give each replica an "
    "id of its own (--replica-id, LORA_FS_REPLICA_ID)"
)
_LEFT = event("status_file.left")


class Reporter:
    """Writes ``.replicas/<replica>.json`` and ``.events/<replica>.json``.

    Args:
        url: where other hosts reach this sidecar.
        expectation: what this replica judges adapters by.
    Attributes:
        changed_by: asked who changes adapters over HTTP.
    """

    def __init__(
        self,
        registry: Registry,
        volume: Volume,
        url: str | None,
        expectation: Expectation,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry, self._volume, self._url, self._clock = registry, volume, url, clock
        self._expectation = expectation
        self.changed_by: Callable[[], ChangedBy | None] = lambda: None
        self._heartbeat = self._began = secrets.randbelow(1 << 30)
        self._written: object = None
        self._written_at = self._paid_until = clock()
        self._events_written, self._events_written_at = 0, -EVENTS_S
        self._task: asyncio.Task[None] | None = None
        self._due = False
        self._writing, self._withdrawn = threading.Lock(), False
        self._threads = Daemons(2, "lora-fs-status")  # one writes, one withdraws
        self._wrote: bytes | None = None  # as the status file
        self._shared_until = clock()  # with another process of this id

    async def beat(self, replica: Replica) -> None:
        """Write at every heartbeat, whatever the replica waits for, until cancelled."""
        while True:
            due_s = self._written_at + HEARTBEAT_S - self._clock()
            if due_s <= 0:
                self.report(replica)
            await asyncio.sleep(due_s if due_s > 0 else HEARTBEAT_S / 2)

    def report(self, replica: Replica) -> None:
        """Write soon, if anything changed or the heartbeat is due."""
        self._due = True
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._reports(replica), name="status file")

    async def _reports(self, replica: Replica) -> None:
        while self._due:  # again, if something changed during the write
            early_s = self._paid_until - AT_ONCE_S - self._clock()
            await asyncio.sleep(max(GATHER_S, early_s))  # gathers the changes of one pass into one write
            self._due = False
            await self._report(replica)

    async def _report(self, replica: Replica) -> None:
        notable, counts = replica.notable()
        told = replica.dated(notable)
        readiness, recent = replica.readiness(), self._volume.recent
        downloads = dict(replica.downloads())
        limits = limits_of(self._expectation, *replica.facts())
        adapters, left_out = bounded(told, recent)
        content = (adapters, counts, readiness, recent, downloads, limits)
        now = self._clock()
        if content != self._written or now - self._written_at >= HEARTBEAT_S:
            self._heartbeat += 1
            self._paid_until = max(self._paid_until, now) + EACH_S
            usage = replica.usage()
            status = ReplicaStatus(
                replica=replica.replica_id,
                model=replica.model,
                namespaces=replica.namespaces,
                url=self._url,
                engine="ready" if readiness.ready else "unknown",
                heartbeat=self._heartbeat,
                updated_at=utc_now().isoformat(timespec="seconds"),
                counts=dict(counts),
                adapters=adapters,
                adapters_left_out=left_out,
                recent=dict(recent),
                conditions=readiness.conditions,
                conditions_since=dict(readiness.since),
                downloads=downloads,
                figures=dict(replica.figures()),
                limits=limits,
                usage={str(key): counts for key, counts in usage.revisions.items()},
                usage_left_out=usage.left_out,
                changed_by=self.changed_by(),
            )
            if not await self._write(self._registry.layout.replica(replica.replica_id), status):
                return
            self._written, self._written_at = content, now
        version = replica.events.version
        if version != self._events_written and now - self._events_written_at >= EVENTS_S:
            events = EventList(
                replica=replica.replica_id,
                model=replica.model,
                updated_at=utc_now().isoformat(timespec="seconds"),
                events=replica.events.events(),
            )
            if await self._write(self._registry.layout.event_list(replica.replica_id), events):
                self._events_written, self._events_written_at = version, now

    async def _write(self, path: Path, value: ReplicaStatus | EventList) -> bool:
        def write() -> str | None:
            with self._writing:
                if self._withdrawn:
                    return None
                self._registry.check_identity()
                make_folder(path.parent, root=self._registry.layout.root)
                is_status = isinstance(value, ReplicaStatus)
                if is_status and self._written_by_another(path):
                    self._shared_until = self._clock() + SHARED_S
                data = seal(value)
                atomic.replace(path, data)
                self._wrote = data if is_status else self._wrote
                return SHARED.format(path) if self._clock() < self._shared_until else None

        try:
            problem = await self._threads.run(write)
        except RegistryMissing:
            return False  # which the volume's own condition says
        except LoraFsError as error:
            self._volume.status_problem = str(error)
            return False
        self._volume.status_problem = problem
        return True

    def _written_by_another(self, path: Path) -> bool:
        """Whether a process beside this one wrote its status file since this one did."""
        data = atomic.read_bytes(path) if self._wrote else None  # before, it may be an earlier process's
        if data is None or data == self._wrote:
            return False
        with suppress(CorruptRecord, KeyError, TypeError):
            return not self._began <= unseal(data)["heartbeat"] <= self._heartbeat
        return False

    async def withdraw(self, replica_id: str) -> None:
        """Remove both files at shutdown, for good, unless another process of that id writes them. Bounded."""
        if self._task is not None:
            self._task.cancel()
        layout = self._registry.layout

        def remove() -> None:
            with self._writing:  # by the thread of the report just cancelled, which goes on
                self._withdrawn = True
                own = not self._written_by_another(layout.replica(replica_id))
                for path in (layout.replica(replica_id), layout.event_list(replica_id)) if own else ():
                    path.unlink(missing_ok=True)
            self._registry.close()

        try:
            with anyio.fail_after(WITHDRAW_S):
                await self._threads.run(remove)
        except TimeoutError:
            logger.warning("the status file is not removed: the volume does not answer", extra=_LEFT)
        except (OSError, LoraFsError) as error:
            logger.warning("the status file is not removed: %s", error, extra=_LEFT)
