"""The volume as the replica sees it: a thread that looks, and the last good state.

The thread reads HEAD every ``poll_s``, at once when the filesystem notifies, and lists the
tree when HEAD changed or a scan is due; it adopts dropped folders. A volume that fails or
hangs leaves the last good state in force and is a condition, never an empty state.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path

from watchdog.events import (
    DirCreatedEvent,
    DirDeletedEvent,
    DirMovedEvent,
    FileCreatedEvent,
    FileSystemEvent,
    FileSystemEventHandler,
)
from watchdog.observers import Observer
from watchdog.observers.api import BaseObserver, ObservedWatch

from lora_fs.sidecar.errors import LoraFsError
from lora_fs.sidecar.registry.adopt import Adopter
from lora_fs.sidecar.registry.layout import HEAD, Layout
from lora_fs.sidecar.registry.view import Desired, RegistryView

logger = logging.getLogger(__name__)

SETTLING_POLL_S = 0.5
FOLDER_SCAN_S = 15.0
SCAN_SHARE = 200  # a look at every folder takes at most 1/200 of the time, however many there are
STALLED_AFTER_S = 10.0
RECENT = 512
TOLD = 20  # conditions of one kind
# HEAD is moved in from a folder that is not watched, which reads as created, and a dropped folder
# is a directory's event. Without a filter the kernel also reports every read of HEAD, our own
# polls among them.
EVENTS: list[type[FileSystemEvent]] = [FileCreatedEvent, DirCreatedEvent, DirMovedEvent, DirDeletedEvent]


class Volume:
    """Owns the view and the adopter, and the one thread that uses them.

    Attributes:
        read_once: the tree was read at least once: an empty state is empty, not unknown.
        recent: series that changed lately → generation seen.
        status_problem: why the status file is not written, told by who writes it.
    """

    def __init__(
        self, layout: Layout, view: RegistryView, adopter: Adopter, *, poll_s: float, notify: bool
    ) -> None:
        self._layout, self._view, self._adopter = layout, view, adopter
        self._poll_s = poll_s
        self._on_change: Callable[[], None] = lambda: None
        self._changed, self._stop = threading.Event(), threading.Event()
        self._looking = threading.Lock()
        self._problem: str | None = None
        self._looked_at = time.monotonic()
        self._folders_due_at = 0.0
        self._notify = _Notify(self._notified) if notify else None
        self._folders_changed = False
        self._watches: dict[Path, ObservedWatch] = {}
        self.read_once = False
        self.recent: Mapping[str, int] = {}
        self.status_problem: str | None = None

    @property
    def desired(self) -> Desired:
        """The last good state."""
        return self._view.desired

    def conditions(self) -> tuple[str, ...]:
        """What is wrong with the volume, for people."""
        desired, found = self._view.desired, []
        if self._problem is not None:
            found.append(f"VolumeUnavailable: {self._problem}")
        stalled = time.monotonic() - self._looked_at
        if stalled > max(STALLED_AFTER_S, 3 * self._poll_s):
            found.append("VolumeStalled: it does not answer; the last good state is in force")
        if desired.frozen:
            found.append(f"Frozen: {desired.frozen}")
        found += [f"Unreadable: {problem}" for problem in islice(desired.problems.values(), TOLD)]
        refused = islice(self._adopter.refusals().items(), TOLD)
        found += [f"NotAdopted: {key}: {why}" for key, why in refused]
        if self.status_problem is not None:
            found.append(f"StatusNotWritten: {self.status_problem}")
        return tuple(found)

    def start(self, on_change: Callable[[], None]) -> None:
        """Look, and keep looking. ``on_change`` is called on the running event loop."""
        loop = asyncio.get_running_loop()

        def changed() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(on_change)

        self._on_change = changed
        threading.Thread(target=self._watch, name="lora-fs-volume", daemon=True).start()

    def stop(self) -> None:
        """Tell the thread to end. It is not waited for: the volume may hang."""
        self._stop.set()
        self._changed.set()

    def look_now(self) -> None:
        """Read what was just written. Blocking; call in a thread."""
        if self._look(adopt=False, force=True):
            self._on_change()

    # -- the thread ----------------------------------------------------------------------------

    def _watch(self) -> None:
        observer = Observer() if self._notify is not None else None
        if observer is not None:
            observer.start()
        while not self._stop.is_set():
            self._changed.clear()
            self._pass()
            if observer is not None and self._subscribe(observer):
                self._notified(folders=True)  # names that came before the subscription
            settling = self._adopter.waiting()
            self._changed.wait(min(self._poll_s, SETTLING_POLL_S) if settling else self._poll_s)
        if observer is not None:
            observer.stop()

    def _notified(self, *, folders: bool) -> None:
        self._folders_changed |= folders
        self._changed.set()

    def _pass(self) -> None:
        changed, self._folders_changed = self._folders_changed, False
        due = changed or self._adopter.waiting() or time.monotonic() >= self._folders_due_at
        try:
            fresh = self._look(adopt=due, force=due)
        except LoraFsError as error:
            if self._problem is None:
                logger.warning("%s; the last good state stays in force", error)
            self._problem = str(error)
        except Exception as error:
            logger.exception("the volume's watcher failed and goes on")
            self._problem = f"internal error: {error}"
        else:
            first, self.read_once = not self.read_once, True
            recovered, self._problem = self._problem is not None, None
            if fresh or first or recovered:
                self._on_change()
        self._looked_at = time.monotonic()

    def _look(self, *, adopt: bool, force: bool) -> bool:
        with self._looking:
            started = time.monotonic()
            before = self._view.desired
            fresh = self._view.refresh(force=force)
            if adopt and self._adopter.step(self._view.desired):
                fresh |= self._view.refresh(force=True)
            if adopt:
                took = time.monotonic() - started
                self._folders_due_at = started + max(FOLDER_SCAN_S, took * SCAN_SHARE)
            if fresh:
                self._note_recent(before, self._view.desired)
            return fresh

    def _note_recent(self, before: Desired, after: Desired) -> None:
        changes: dict[str, int] = {}
        for key, record in after.records.items():
            if before.records.get(key) is not record:
                changes[str(key)] = record.generation
        for (scope, name), pointer in after.pointers.items():
            if before.pointers.get((scope, name)) is not pointer:
                changes[f"{scope}/.active/{name}"] = pointer.generation
        kept = {name: seen for name, seen in self.recent.items() if name not in changes}
        self.recent = dict(list({**kept, **changes}.items())[-RECENT:])

    def _subscribe(self, observer: BaseObserver) -> bool:
        """Watch the root and the few folders in which names appear; True if one is new."""
        layout, desired = self._layout, self._view.desired
        folders = {layout.root}
        for scope, listing in desired.listings.items():
            folders |= {layout.root / scope.namespace, layout.scope(scope)}
            folders |= {layout.revision(scope, revision) for revision in listing.revisions}
        for folder in self._watches.keys() - folders:
            with suppress(OSError, KeyError):
                observer.unschedule(self._watches.pop(folder))
        before = len(self._watches)
        for folder in folders - self._watches.keys():
            with suppress(OSError):  # not there yet, or no watches left: the polls go on
                if self._notify is not None:
                    self._watches[folder] = observer.schedule(self._notify, str(folder), event_filter=EVENTS)
        return len(self._watches) > before


class _Notify(FileSystemEventHandler):
    """Tells of HEAD's replacement, and of folders that come and go."""

    def __init__(self, tell: Callable[..., None]) -> None:
        self._tell = tell

    def on_any_event(self, event: FileSystemEvent) -> None:
        name = Path(str(event.dest_path or event.src_path)).name
        if event.is_directory or name == HEAD:
            self._tell(folders=event.is_directory)
