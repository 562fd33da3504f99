"""The volume as the replica uses it: a thread that looks, and calls that write.

All disk work is here and in ``staging``, never on the event loop. The thread reads HEAD every
``poll_s``, at once when the filesystem notifies, and lists the tree when HEAD changed or a scan
is due. A volume that fails or hangs leaves the last good state in force and is a condition.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import anyio.to_thread
from watchdog.events import FileSystemEvent, FileSystemEventHandler
from watchdog.observers import Observer

from lora_fs.sidecar.errors import Conflict, InputError, LoraFsError
from lora_fs.sidecar.model import AdapterKey, Phase, Record, ReplicaStatus, Scope
from lora_fs.sidecar.reconcile.catalog import Served
from lora_fs.sidecar.registry import atomic, operations
from lora_fs.sidecar.registry.adopt import Adopter
from lora_fs.sidecar.registry.codec import seal
from lora_fs.sidecar.registry.operations import Registration
from lora_fs.sidecar.registry.store import Registry
from lora_fs.sidecar.registry.view import Desired, RegistryView
from lora_fs.sidecar.validate import Expectation

if TYPE_CHECKING:
    from lora_fs.sidecar.reconcile.replica import LoadRequest, Replica

logger = logging.getLogger(__name__)

HEARTBEAT_S = 10.0
SETTLING_POLL_S = 0.5
FOLDER_SCAN_S = 15.0
STALLED_AFTER_S = 30.0
RECENT = 512


class _Notify(FileSystemEventHandler):
    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def on_any_event(self, event: FileSystemEvent) -> None:
        if event.event_type in ("created", "moved", "deleted"):
            self._wake()


class Volume:
    """Owns the view, the adopter and the replica's status file."""

    def __init__(
        self,
        registry: Registry,
        scopes: tuple[Scope, ...],
        view: RegistryView,
        adopter: Adopter,
        expectation: Expectation,
        *,
        poll_s: float,
        notify: bool,
        allowed_sources: tuple[Path, ...],
        url: str | None,
    ) -> None:
        self._registry, self._scopes, self._view, self._adopter = registry, scopes, view, adopter
        self._expectation, self._poll_s, self._notify = expectation, poll_s, notify
        self._allowed = tuple(p.resolve() for p in (registry.layout.root, *allowed_sources))
        self._url = url
        self._changed = threading.Event()
        self._stop = threading.Event()
        self._problem: str | None = None
        self._status_problem: str | None = None
        self._looked_at = time.monotonic()
        self._heartbeat = 0
        self._published: tuple[object, float] = (None, 0.0)
        self._publish_task: asyncio.Task[None] | None = None
        self._recent: dict[str, int] = {}
        self._watched: set[str] = set()
        self.read_once = False

    @property
    def desired(self) -> Desired:
        return self._view.desired

    def conditions(self) -> tuple[str, ...]:
        """What is wrong with the volume, for people."""
        desired, found = self._view.desired, []
        if self._problem is not None:
            found.append(f"VolumeUnavailable: {self._problem}")
        stalled = time.monotonic() - self._looked_at
        if stalled > STALLED_AFTER_S:
            found.append(f"VolumeStalled: no answer for {stalled:.0f} s; the last good state is in force")
        if desired.frozen:
            found.append(f"Frozen: {desired.frozen}")
        found += [f"Unreadable: {problem}" for problem in list(desired.problems.values())[:20]]
        found += [f"NotAdopted: {key}: {why}" for key, why in list(self._adopter.refusals().items())[:20]]
        if self._status_problem is not None:
            found.append(f"StatusNotWritten: {self._status_problem}")
        return tuple(found)

    # -- the thread ----------------------------------------------------------------------------

    def start(self, on_change: Callable[[], None]) -> None:
        """Look once, then keep looking. ``on_change`` is called on the running event loop."""
        loop = asyncio.get_running_loop()

        def changed() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(on_change)

        threading.Thread(target=self._watch, args=(changed,), name="lora-fs-volume", daemon=True).start()

    def stop(self) -> None:
        self._stop.set()
        self._changed.set()

    def _watch(self, changed: Callable[[], None]) -> None:
        observer = Observer() if self._notify else None
        if observer is not None:
            observer.start()
        scanned = 0.0
        while not self._stop.is_set():
            notified = self._changed.is_set()
            self._changed.clear()
            try:
                folders_due = time.monotonic() - scanned >= FOLDER_SCAN_S
                force = notified or folders_due or self._adopter.waiting()
                if force:
                    scanned = time.monotonic()
                fresh = self._look(force) or not self.read_once
                was, self._problem = self._problem, None
                self.read_once = True
                if fresh or was:
                    changed()
            except LoraFsError as error:
                if self._problem is None:
                    logger.warning("%s; the last good state stays in force", error)
                self._problem = str(error)
            except Exception as error:
                logger.exception("the volume's watcher failed and goes on")
                self._problem = f"internal error: {error}"
            self._looked_at = time.monotonic()
            if observer is not None:
                self._observe(observer)
            self._changed.wait(
                min(self._poll_s, SETTLING_POLL_S) if self._adopter.waiting() else self._poll_s
            )
        if observer is not None:
            observer.stop()

    def _look(self, force: bool) -> bool:
        before = self._view.desired
        fresh = self._view.refresh(force=force)
        if self._adopter.step(self._view.desired):
            fresh |= self._view.refresh(force=True)
        if fresh:
            self._note_recent(before, self._view.desired)
        return fresh

    def _note_recent(self, before: Desired, after: Desired) -> None:
        changes: list[tuple[str, int]] = []
        for key, record in after.records.items():
            if before.records.get(key) is not record:
                changes.append((str(key), record.generation))
        for (scope, name), pointer in after.pointers.items():
            if before.pointers.get((scope, name)) is not pointer:
                changes.append((f"{scope}/.active/{name}", pointer.generation))
        recent = {**self._recent, **dict(changes[-RECENT:])}
        self._recent = dict(list(recent.items())[-RECENT:])

    def _observe(self, observer: Observer) -> None:  # type: ignore[valid-type]
        """Watch the root and the few folders in which names appear."""
        layout = self._registry.layout
        folders = [layout.root]
        for scope, listing in self._view.desired.listings.items():
            folders += [layout.root / scope.namespace, layout.scope(scope)]
            folders += [layout.revision(scope, revision) for revision in listing.revisions]
        for folder in folders:
            if str(folder) in self._watched:
                continue
            try:
                observer.schedule(_Notify(self._changed.set), str(folder))  # type: ignore[attr-defined]
                self._watched.add(str(folder))
            except OSError as error:
                logger.debug("no notifications from %s: %s", folder, error)

    # -- writing -------------------------------------------------------------------------------

    async def run(self, call: Callable[[], object]) -> None:
        """Run a blocking call in a thread, then look."""
        await anyio.to_thread.run_sync(call)
        await anyio.to_thread.run_sync(lambda: self._view.refresh(force=True))

    async def register(self, request: LoadRequest, writer: str) -> tuple[Record, Callable[[], object]]:
        """Register for the HTTP API; returns the record and how to take it back."""
        scope = self._scopes[0]
        name = request.lora_name
        if "/" in name and len(self._scopes) > 1:
            namespace, _, name = name.partition("/")
            scope = next((s for s in self._scopes if s.namespace == namespace), scope)
            if scope.namespace != namespace:
                raise InputError(f"namespace {namespace!r} is not served here")
        source = Path(request.lora_path)
        before = self._view.desired.pointers.get((scope, name))

        def call() -> operations.Registered:
            resolved = source.resolve()
            if "\0" in request.lora_path or not any(resolved.is_relative_to(root) for root in self._allowed):
                raise InputError(
                    f"lora_path {request.lora_path[:200]!r} is not under an allowed folder: "
                    "put it on the volume, or name its folder in LORA_FS_ALLOWED_SOURCES"
                )
            return operations.register(
                self._registry,
                scope,
                Registration(
                    name,
                    resolved,
                    f"file://{resolved}",
                    origin="api",
                    must_be_new=not request.load_inplace,
                ),
                self._expectation,
                writer=writer,
            )

        done = await anyio.to_thread.run_sync(call)
        await anyio.to_thread.run_sync(lambda: self._view.refresh(force=True))

        def undo() -> object:
            if before is not None and before.revision is not None:
                operations.promote(self._registry, scope, name, before.revision, writer=writer)
            if not done.changed:
                return None
            return operations.unregister(
                self._registry, scope, name, revision=done.record.revision, writer=writer
            )

        return done.record, undo

    async def unregister(self, served: Served, writer: str) -> None:
        key = served.record.key
        revision = key.revision if "@" in served.name else None

        def call() -> None:
            operations.unregister(
                self._registry,
                key.scope,
                key.name,
                revision=revision,
                all_revisions=revision is None,
                writer=writer,
            )
            self._view.refresh(force=True)

        try:
            await anyio.to_thread.run_sync(call)
        except Conflict as error:
            raise Conflict(f"{served.name}: {error}; try again") from error

    # -- status --------------------------------------------------------------------------------

    def publish(self, replica: Replica) -> None:
        """Write this replica's status soon, if it changed or the heartbeat is due."""
        if self._publish_task is None or self._publish_task.done():
            self._publish_task = asyncio.create_task(self._publish(replica))

    async def _publish(self, replica: Replica) -> None:
        await asyncio.sleep(0.02)  # gathers the changes of one pass into one write
        statuses = replica.statuses()
        told = {name: s for name, s in statuses.items() if s.phase is not Phase.EVICTED}
        counts: dict[str, int] = {}
        for status in statuses.values():
            counts[status.phase] = counts.get(status.phase, 0) + 1
        readiness = replica.readiness()
        content = (told, counts, readiness, self._recent)
        now = time.monotonic()
        if content == self._published[0] and now - self._published[1] < HEARTBEAT_S:
            return
        self._heartbeat += 1
        status_file = ReplicaStatus(
            replica=replica.replica_id,
            model=replica.model,
            namespaces=replica.namespaces,
            url=self._url,
            engine="ready" if readiness.ready else "unknown",
            heartbeat=self._heartbeat,
            updated_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            counts=counts,
            adapters=told,
            recent=self._recent,
            conditions=readiness.conditions,
        )
        path = self._registry.layout.replica(replica.replica_id)
        try:
            await anyio.to_thread.run_sync(atomic.replace, path, seal(status_file), abandon_on_cancel=True)
            self._status_problem = None
            self._published = (content, now)
        except LoraFsError as error:
            self._status_problem = str(error)

    def withdraw_status(self, replica_id: str) -> None:
        """Remove the status file at shutdown: this replica is no more."""
        try:
            self._registry.layout.replica(replica_id).unlink(missing_ok=True)
        except OSError as error:
            logger.warning("status not removed: %s", error)
        self._registry.close()


def scopes_of(namespaces: tuple[str, ...], model: str) -> tuple[Scope, ...]:
    """One scope a namespace."""
    return tuple(Scope(AdapterKey.checked(n, model, "v1", "a").namespace, model) for n in namespaces)
