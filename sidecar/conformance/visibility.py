"""How long after a change on one mount the other shows it, and whether it gets a wake-up.

Each delay begins when the writing call on one mount returns. It ends with the first look on the other that
shows the change, by when that look was due: a busy machine's delay is not the mount's.
Both read the host's monotonic clock. It looks at what the registry looks at: an exact name
opened and read, a listing, a dropped folder's fingerprint, HEAD.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from watchdog.events import FileSystemEvent, FileSystemEventHandler
from watchdog.observers import Observer

from lora_fs.sidecar.conformance.contention import SCOPE
from lora_fs.sidecar.conformance.pair import ANSWER_S, Pair
from lora_fs.sidecar.conformance.report import Delay, Try
from lora_fs.sidecar.errors import VolumeUnavailable
from lora_fs.sidecar.reconcile.watch.watcher import EVENTS
from lora_fs.sidecar.registry.format.layout import HEAD, LEASES
from lora_fs.sidecar.registry.lifecycle import artifacts
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.registry.view.view import RegistryView
from lora_fs.sidecar.registry.volume import atomic
from lora_fs.sidecar.registry.volume.atomic import LinkUnsupported, TemporaryNames
from lora_fs.sidecar.registry.volume.folders import make_folder
from lora_fs.sidecar.registry.volume.mounts import kind_of, timing_for

TRIES = 25
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.001, 0.05
_names = TemporaryNames()
_watching: list[tuple[threading.Event, object]] = []  # in the agent that watches
_views: list[RegistryView] = []  # in the agent that follows
_registries: list[Registry] = []  # in the agent that registers

Look = Literal["bytes", "listing", "gone", "fingerprint"]


class Looks(NamedTuple):
    """Of one change, on the host's monotonic clock.

    Attributes:
        vain: when the last look in vain began; None if there was none.
        shown: when the first look was due that showed it; None if none did in time.
    """

    vain: float | None
    shown: float | None

    def since(self, done: float) -> Try:
        """As seconds after the writing call returned."""
        vain_s = 0.0 if self.vain is None else max(0.0, self.vain - done)
        return Try(vain_s, None if self.shown is None else max(0.0, self.shown - done))


def look(kind: Look, path: Path) -> object:
    """What ``there`` sees; compared, never interpreted. A mount that answers with an error shows nothing."""
    try:
        if kind == "listing":
            return path.name in (atomic.list_names(path.parent) or ())
        if kind == "fingerprint":
            return artifacts.fingerprint(path)
        return atomic.read_bytes(path)
    except VolumeUnavailable:
        return None


def wait_for_change(kind: Look, path: Path, wanted: object, differs: bool, wait_s: float) -> Looks:
    """Look until one shows ``wanted``, or with ``differs`` anything else."""
    due, pause_s, vain = time.monotonic(), _FIRST_PAUSE_S, None
    end = due + wait_s
    while True:
        began = time.monotonic()
        if (look(kind, path) != wanted) is differs:
            return Looks(vain, due)
        vain, looked = began, time.monotonic()
        if looked > end:
            return Looks(vain, None)
        due = looked + pause_s
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LAST_PAUSE_S)


def create(path: Path, data: bytes) -> float:
    """Publish as records are; where there is no link() as they are there. When it was done."""
    _names.sweep()
    try:
        atomic.publish(path, data, _names)
    except LinkUnsupported:
        atomic.create_unique(path, data)
    return time.monotonic()


def replace(path: Path, data: bytes) -> float:
    """Replace as HEAD is. When it was done."""
    atomic.replace(path, data)
    return time.monotonic()


def remove(path: Path) -> float:
    """When it was done."""
    os.unlink(path)
    return time.monotonic()


@dataclass(frozen=True, slots=True)
class Visibility:
    """The probes of one pair: each makes one try.

    Args:
        share_s: about how long two of the probes may take, beyond their waits.
        wait_s: how long to wait for one change.
    """

    pair: Pair
    share_s: Callable[[], float]
    wait_s: float

    def all(self) -> Iterator[Delay]:
        """Every delay, in the order in which people ask."""
        for name, text, probe in (
            ("create", "a new file, its name not asked for before", self.created),
            ("create-asked", "a new file, its name asked for before in vain", self.created_after_a_look),
            ("listing", "a new name in a folder's listing", self.listed),
            ("replace", "a replaced file, opened and read", self.replaced),
            ("delete", "a deleted file, opened", self.deleted),
            ("stat", "a file's size or time, in a listing of a dropped folder", self.stat),
        ):
            here, there = self.pair.make(name, ANSWER_S)
            tries: list[Try] = []
            end = time.monotonic() + self.share_s() / 2
            while _go_on(tries, end):
                tries.append(probe(here, there, len(tries)))
            yield Delay.of(name, text, tries, self.wait_s)

    def _change(self, function: Callable[..., float], *args: object) -> float:
        return self.pair.here.agent.call(ANSWER_S, function, *args)

    def _wait(self, kind: Look, path: Path, wanted: object, *, differs: bool = False) -> Looks:
        agent = self.pair.there.agent
        return agent.call(self.wait_s + ANSWER_S, wait_for_change, kind, path, wanted, differs, self.wait_s)

    def _look(self, kind: Look, path: Path) -> object:
        return self.pair.there.agent.call(ANSWER_S, look, kind, path)

    def created(self, here: Path, there: Path, number: int) -> Try:
        name, data = f"new-{number}", b"%d" % number
        done = self._change(create, here / name, data)
        return self._wait("bytes", there / name, data).since(done)

    def created_after_a_look(self, here: Path, there: Path, number: int) -> Try:
        name, data = f"asked-{number}", b"%d" % number
        self._look("bytes", there / name)
        done = self._change(create, here / name, data)
        return self._wait("bytes", there / name, data).since(done)

    def listed(self, here: Path, there: Path, number: int) -> Try:
        name = f"listed-{number}"
        self._look("listing", there / name)
        done = self._change(create, here / name, b"")
        return self._wait("listing", there / name, True).since(done)

    def replaced(self, here: Path, there: Path, number: int) -> Try:
        before, after = b"before %d" % number, b"after %d" % number
        self._change(replace, here / HEAD, before)
        self._wait("bytes", there / HEAD, before)
        done = self._change(replace, here / HEAD, after)
        return self._wait("bytes", there / HEAD, after).since(done)

    def deleted(self, here: Path, there: Path, number: int) -> Try:
        name = f"deleted-{number}"
        self._change(create, here / name, b"x")
        self._wait("bytes", there / name, b"x")
        done = self._change(remove, here / name)
        return self._wait("bytes", there / name, None).since(done)

    def stat(self, here: Path, there: Path, number: int) -> Try:
        name = "weights"
        self._change(replace, here / name, b"x" * (2 * number + 1))
        self._wait("bytes", there / name, b"x" * (2 * number + 1))
        before = self._look("fingerprint", there)
        done = self._change(replace, here / name, b"x" * (2 * number + 2))
        return self._wait("fingerprint", there, before, differs=True).since(done)


def _go_on(tries: list[Try], end: float) -> bool:
    return not tries or (len(tries) < TRIES and tries[-1].seen_s is not None and time.monotonic() < end)


class _Wakes(FileSystemEventHandler):
    def __init__(self, woken: threading.Event) -> None:
        self._woken = woken

    def on_any_event(self, event: FileSystemEvent) -> None:
        if Path(str(event.dest_path or event.src_path)).name == HEAD:
            self._woken.set()


def watch(folder: Path) -> bool:
    """Watch a folder as a sidecar watches its root; False if this host has no watch left."""
    woken, observer = threading.Event(), Observer()
    try:
        observer.schedule(_Wakes(woken), str(folder), event_filter=EVENTS)
        observer.start()
    except OSError:
        return False
    _watching.append((woken, observer))
    return True


def woken(wait_s: float) -> bool:
    """Whether the watch that was begun last has reported HEAD."""
    return _watching[-1][0].wait(wait_s)


def replace_head(folder: Path) -> None:
    """Replace HEAD as the registry does: by a draft in a folder that nobody watches."""
    atomic.replace(folder / HEAD, b"moved\n", draft_in=folder / LEASES)


def notified(pair: Pair, wait_s: float) -> bool | None:
    """Whether a replaced HEAD wakes a watcher on the other mount; None if none can watch."""
    here, there = pair.make("watched", ANSWER_S)
    pair.here.agent.call(ANSWER_S, make_folder, here / LEASES)
    if not pair.there.agent.call(ANSWER_S, watch, there):
        return None
    pair.here.agent.call(ANSWER_S, replace_head, here)
    return pair.there.agent.call(wait_s + ANSWER_S, woken, wait_s)


def register(path: Path, name: str) -> float:
    """Write a name's next generation and announce it, as every command does. When that was done."""
    if not _registries:
        _registries.append(Registry(path))
    registry = _registries[-1]
    fields = {"revision": "v1", "previous_revision": None, "canary": None}
    registry.append(registry.pointers(SCOPE, name), lambda _: fields, writer="doctor")
    return time.monotonic()


def follow(path: Path) -> None:
    """Begin to follow a registry as a sidecar does."""
    view = RegistryView(Registry(path), (SCOPE,), lag_s=timing_for(kind_of(path)).lag_s)
    view.refresh()
    _views.append(view)


def followed(name: str, wait_s: float) -> Looks:
    """Look until the view shows the name."""
    view, due, vain = _views[-1], time.monotonic(), None
    end = due + wait_s
    while True:
        began = time.monotonic()
        view.refresh()
        if (SCOPE, name) in view.desired.pointers:
            return Looks(vain, due)
        vain, looked = began, time.monotonic()
        if looked > end:
            return Looks(vain, None)
        due = looked + _LAST_PAUSE_S / 5
        time.sleep(_LAST_PAUSE_S / 5)


def registered(pair: Pair, roots: tuple[Path, Path], share_s: float, wait_s: float) -> Delay:
    """A registration on one mount, until a reader on the other has it: HEAD, the listing and the record."""
    here, there = roots
    pair.there.agent.call(ANSWER_S, follow, there)
    tries: list[Try] = []
    end = time.monotonic() + share_s
    while _go_on(tries, end):
        name = f"followed-{len(tries)}"
        done = pair.here.agent.call(ANSWER_S, register, here, name)
        tries.append(pair.there.agent.call(wait_s + ANSWER_S, followed, name, wait_s).since(done))
    return Delay.of("registered", "a registration, as a replica follows it", tries, wait_s)
