"""The volume as the replica sees it: a thread that looks, and the last good state.

The thread reads HEAD every ``poll_s``, and at once when the filesystem notifies. It reads the files that HEAD
lists, or the tree when HEAD lists none or a scan is due. It adopts dropped folders. A volume that fails or
hangs leaves the last good state in force and is a condition, never an empty state.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain, islice
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

from lora_fs.sidecar.errors import LoraFsError, RegistryMissing, VolumeUnavailable
from lora_fs.sidecar.logs import event
from lora_fs.sidecar.model.status import RECENT
from lora_fs.sidecar.registry.drops.adopt import Adopter
from lora_fs.sidecar.registry.format.layout import HEAD, Layout
from lora_fs.sidecar.registry.view.snapshot import Desired, touched
from lora_fs.sidecar.registry.view.view import RegistryView

logger = logging.getLogger(__name__)

SETTLING_POLL_S = 0.5
FOLDER_SCAN_S = 15.0
SCAN_SHARE = 200  # a look at every folder takes at most 1/200 of the time, adopting them apart
STALLED_AFTER_S = 10.0
TOLD = 20  # conditions of one kind
MOST_WATCHED = 64  # folders; each takes a thread. The polls find what happens in others
# HEAD is moved in from an unwatched folder, which reads as created, and a dropped folder
# is a directory's event. Without a filter the kernel also reports every read of HEAD, our own
# polls among them.
EVENTS: list[type[FileSystemEvent]] = [FileCreatedEvent, DirCreatedEvent, DirMovedEvent, DirDeletedEvent]


class Volume:
    """Owns the view, the adopter and the thread that uses them; others refresh the view beside it.

    Attributes:
        read_once: the tree was read at least once: an empty state is empty, not unknown.
        recent: series that changed lately → generation seen.
        status_problem: why the status file is not written, from its writer.
        poll_s: seconds between two reads of HEAD.
        beside: returns the conditions of the other watched stores.
        found: called, in the thread, when a registry appears where none was.
    """

    def __init__(
        self,
        layout: Layout,
        view: RegistryView,
        adopter: Adopter,
        *,
        poll_s: float,
        notify: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._layout, self._view, self._adopter = layout, view, adopter
        self.poll_s, self._clock = poll_s, clock
        self.found: Callable[[], None] = lambda: None
        self._on_change: Callable[[], None] = lambda: None
        self._changed, self._stop = threading.Event(), threading.Event()
        self._looking = threading.Lock()
        self._problem: str | None = None
        self._is_missing = False
        self._looked_at = self._clock()
        self._folders_due_at = 0.0
        self._notify = _Notify(self._notified) if notify else None
        self._to_list: deque[Path] = deque()  # folders in which folders went, or came unseen
        self._dropped: deque[Path] = deque()  # folders that came
        self._watches: dict[Path, ObservedWatch] = {}
        self._subscribed_for: object = None
        self.read_once = False
        self.recent: Mapping[str, int] = {}
        self.status_problem: str | None = None
        self.beside: list[Callable[[], Iterable[str]]] = []

    @property
    def desired(self) -> Desired:
        """The last good state."""
        return self._view.desired

    def check_read(self) -> None:
        """Raises VolumeUnavailable if it was never read."""
        if not self.read_once:
            why = "RegistryMissing: no registry is mounted here" if self._is_missing else "not read yet"
            raise VolumeUnavailable(f"which adapters there are is not known ({why}); see /readyz")

    def conditions(self) -> tuple[str, ...]:
        """The volume's faults, for people."""
        desired, found = self._view.desired, []
        if self._problem is not None:
            missing, lost = f"RegistryMissing: {self._problem}", f"VolumeUnavailable: {self._problem}"
            found.append(missing if self._is_missing else lost)
        stalled = self._clock() - self._looked_at
        if stalled > max(STALLED_AFTER_S, 3 * self.poll_s):
            first = "the first look at it has not ended; nothing is listed until then"
            later = "it does not answer; the last good state is in force"
            found.append(f"VolumeStalled: {later if self.read_once else first}")
        if desired.frozen:
            found.append(f"Frozen: {desired.frozen}")
        found += [f"Unreadable: {problem}" for problem in islice(desired.problems.values(), TOLD)]
        refused = islice(self._adopter.refusals().items(), TOLD)
        found += [f"NotAdopted: {key}: {why}" for key, why in refused]
        found += chain.from_iterable(conditions() for conditions in self.beside)
        if self.status_problem is not None:
            found.append(f"StatusNotWritten: {self.status_problem}")
        return tuple(found)

    def start(self, on_change: Callable[[], None]) -> None:
        """Look, and keep looking. Calls ``on_change`` on the running event loop."""
        loop = asyncio.get_running_loop()

        def changed() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(on_change)

        self._on_change = changed
        threading.Thread(target=self._watch, name="lora-fs-volume", daemon=True).start()

    def stop(self) -> None:
        """Ask the thread to end, and do not wait for it: the volume may hang."""
        self._stop.set()
        self._changed.set()

    def look_now(self) -> None:
        """Read what was just written. Blocking; call in a thread."""
        if self._refresh(force=True):
            self._on_change()

    # -- the thread ----------------------------------------------------------------------------

    def _watch(self) -> None:
        observer = _observer() if self._notify is not None else None
        while not self._stop.is_set():
            self._changed.clear()
            self._pass(observer)
            settling = self._adopter.waiting()
            self._changed.wait(min(self.poll_s, SETTLING_POLL_S) if settling else self.poll_s)
        if observer is not None:
            observer.stop()

    def _notified(self, came: Path | None = None, gone: Path | None = None) -> None:
        if came is not None:
            self._dropped.append(came)
        if gone is not None:
            self._to_list.append(gone.parent)
        self._changed.set()

    def _pass(self, observer: BaseObserver | None = None) -> None:
        """Look, report it, and watch what is there now. Whatever fails, the next pass comes."""
        try:
            fresh = self._look()
            first, self.read_once = not self.read_once, True
            recovered, self._problem = self._problem is not None, None
            if self._is_missing:
                self._is_missing = False
                logger.info("a registry is in %s now", self._layout.root, extra=event("registry.found"))
                self.found()
            if fresh or first or recovered:
                self._on_change()
            if observer is not None:
                self._subscribe(observer)
        except LoraFsError as error:
            self._is_missing = isinstance(error, RegistryMissing)
            if self._problem is None and self._is_missing:
                logger.warning("not ready: %s", error, extra=event("registry.missing"))
            elif self._problem is None:
                logger.warning("%s; the last good state stays in force", error, extra=event("volume.lost"))
            self._problem = str(error)
        except Exception as error:
            logger.exception("the volume's watcher failed and goes on", extra=event("watcher.failed"))
            self._problem = f"internal error: {error}"
        self._looked_at = self._clock()

    def _look(self) -> bool:
        """What HEAD tells, what the filesystem notified of, and all folders if it is time for them."""
        started = self._clock()
        everywhere = started >= self._folders_due_at
        changed, came = _drain(self._to_list), _drain(self._dropped)
        try:
            fresh = self._look_at(changed, came, everywhere=everywhere)
        except Exception:  # nobody notifies of them again
            self._to_list.extend(changed)
            self._dropped.extend(came)
            raise
        if everywhere:
            listing_s = self._clock() - started - self._adopter.adopting_s
            took = listing_s if self.read_once else 0.0  # at first all is read, too
            self._folders_due_at = started + max(FOLDER_SCAN_S, took * SCAN_SHARE)
        return fresh

    def _look_at(self, changed: Collection[Path], came: Collection[Path], *, everywhere: bool) -> bool:
        to_list, dropped = set(changed), set()
        for folder in came:
            key = self._layout.key_of(folder)
            if key is None:
                to_list.add(folder.parent)
            elif key.scope in self._view.desired.listings:
                dropped.add(key)
        to_list |= self._adopter.in_doubt()
        fresh = self._refresh(force=everywhere, folders=to_list)
        look = everywhere or to_list or dropped or self._adopter.waiting()
        if not look:
            return fresh
        with self._followed():
            adopted = self._adopter.step(self._view.desired, everywhere=everywhere, dropped=dropped)
        if adopted:
            fresh |= self._refresh() or self._refresh(force=True)
        return fresh

    @contextmanager
    def _followed(self) -> Iterator[None]:
        """Poll HEAD during an adoption too: to read a large folder takes a minute."""
        ended = threading.Event()

        def follow() -> None:
            while not ended.wait(self.poll_s):
                with suppress(LoraFsError):  # the pass finds it, too, and tells of it
                    if self._refresh():
                        self._on_change()
                    self._looked_at = self._clock()

        follower = threading.Thread(target=follow, name="lora-fs-volume-head", daemon=True)
        with suppress(RuntimeError):  # no thread left: the pass itself looks when it is done
            follower.start()
        try:
            yield
        finally:
            ended.set()

    def _refresh(self, *, force: bool = False, folders: Collection[Path] = ()) -> bool:
        with self._looking:  # not held during an adoption: a writer waits for no other's bytes
            before = self._view.desired
            fresh = self._view.refresh(force=force, folders=folders)
            if fresh:
                self._note_recent(before, self._view.desired)
            return fresh

    def _note_recent(self, before: Desired, after: Desired) -> None:
        records = touched(before.records, after.records)
        seen = [(str(key), after.records.get(key)) for key in records]
        pointers = touched(before.pointers, after.pointers)
        moved = [(f"{scope}/.active/{name}", after.pointers.get((scope, name))) for scope, name in pointers]
        found = {series: body.generation for series, body in chain(seen, moved) if body is not None}
        kept = {name: seen for name, seen in self.recent.items() if name not in found}
        self.recent = dict(list({**kept, **found}.items())[-RECENT:])

    def _subscribe(self, observer: BaseObserver) -> None:
        """Watch the root and the few folders in which names appear. Each watch takes a thread.

        If none is left, the polls continue, and it tries again when names come or go.
        """
        layout, desired = self._layout, self._view.desired
        if desired.listings is self._subscribed_for:
            return
        self._subscribed_for = desired.listings

        def wanted() -> Iterator[Path]:
            yield layout.root
            for scope, listing in desired.listings.items():
                yield from (layout.root / scope.namespace, layout.scope(scope))
                yield from (layout.revision(scope, revision) for revision in listing.revisions)

        folders = dict.fromkeys(islice(wanted(), MOST_WATCHED))
        for folder in self._watches.keys() - folders.keys():
            with suppress(OSError, KeyError):
                observer.unschedule(self._watches.pop(folder))
        for folder in folders:
            if folder in self._watches or self._notify is None:
                continue
            with suppress(OSError, RuntimeError):  # not there yet, no watches or no threads left
                self._watches[folder] = observer.schedule(self._notify, str(folder), event_filter=EVENTS)
                self._to_list.append(folder)  # names that came before the subscription
                self._changed.set()


def _observer() -> BaseObserver | None:
    """Return the notifier; None if there is no thread left for it, or no inotify instance."""
    try:
        observer = Observer()
        observer.start()
    except (OSError, RuntimeError) as error:
        logger.warning(
            "nothing notifies of changes, the polls go on: %s", error, extra=event("volume.polled")
        )
        return None
    return observer


def _drain(waiting: deque[Path]) -> set[Path]:
    found = set()
    while waiting:
        found.add(waiting.popleft())
    return found


class _Notify(FileSystemEventHandler):
    """Tells of HEAD's replacement, and of folders that come and go."""

    def __init__(self, tell: Callable[..., None]) -> None:
        self._tell = tell

    def on_any_event(self, event: FileSystemEvent) -> None:
        source, target = (Path(str(path)) if path else None for path in (event.src_path, event.dest_path))
        if not event.is_directory:
            if HEAD in {path.name for path in (source, target) if path is not None}:
                self._tell()
            return
        came = source if isinstance(event, DirCreatedEvent) else target
        gone = source if not isinstance(event, DirCreatedEvent) else None
        if any(path is not None and not path.name.startswith(".") for path in (came, gone)):
            self._tell(came=came, gone=gone)
