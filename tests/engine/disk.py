"""Which files an engine opens, counted by the kernel."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from watchdog.events import FileOpenedEvent, FileSystemEvent, FileSystemEventHandler
from watchdog.observers.inotify import InotifyObserver

_SEEN_LIMIT_S = 60.0


class Opened(FileSystemEventHandler):
    """Counts the opening of files below one folder, by file name.

    A file opened again with no other of its folder between counts once: safetensors opens what it reads
    twice, and the kernel tells two such openings as one when the first was not fetched yet.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._counts: Counter[str] = Counter()
        self._last: dict[Path, str] = {}
        self._told = threading.Condition()
        self._marks = itertools.count()

    def on_opened(self, event: FileSystemEvent) -> None:
        """The observer's thread calls it."""
        path = Path(str(event.src_path))
        with self._told:
            if self._last.get(path.parent) != path.name:
                self._last[path.parent] = path.name
                self._counts[path.name] += 1
            self._told.notify_all()

    def counts(self) -> Counter[str]:
        """All that was opened before this call: events are in order, so a last one is awaited."""
        mark = self._folder / f".mark-{next(self._marks)}"
        mark.touch()
        with self._told:
            assert self._told.wait_for(lambda: mark.name in self._counts, _SEEN_LIMIT_S)
            del self._counts[mark.name]
            mark.unlink()
            return self._counts.copy()


@contextmanager
def opened(folder: Path) -> Iterator[Opened]:
    """Count from here on."""
    counting = Opened(folder)
    observer = InotifyObserver()
    observer.schedule(counting, str(folder), recursive=True, event_filter=[FileOpenedEvent])
    observer.start()
    try:
        yield counting
    finally:
        observer.stop()
        observer.join()
