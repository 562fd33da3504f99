"""What this engine holds, who uses it, and one load for any number of waiters.

Owns the names that were given to the engine and the requests in flight on each. The engine's loads and
unloads of one name never overlap; a copy is staged before that, so that what waits for room locks no name
that could make room. An adapter that fails is remembered with its backoff. A name the engine loaded from
elsewhere than the stage folder is not ours and is left alone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from weakref import WeakSet, WeakValueDictionary

from lora_fs.sidecar import tracing
from lora_fs.sidecar.engine.protocol import Activity, Engine, Loaded
from lora_fs.sidecar.errors import (
    EngineRejected,
    LoraFsError,
    NameTaken,
    NoSpareRoom,
    TemporaryError,
    WaitTimeout,
)
from lora_fs.sidecar.logs import event
from lora_fs.sidecar.model import Phase, Record, public_of, side_name
from lora_fs.sidecar.reconcile import backoff
from lora_fs.sidecar.reconcile.backoff import Failure
from lora_fs.sidecar.reconcile.catalog import Served
from lora_fs.sidecar.reconcile.stage.jobs import Stager
from lora_fs.sidecar.reconcile.telemetry.durations import Durations
from lora_fs.sidecar.reconcile.telemetry.events import EventLog

logger = logging.getLogger(__name__)

# From the first scrape on: of a series that begins at 1 Prometheus sees no increase.
_LOADS = ("loads_total", "load_failures_total", "unloads_total")
COUNTERS = (*_LOADS, "request_hits_total", "request_misses_total")


@dataclass(slots=True, weakref_slot=True, eq=False)
class Changing:
    """Engine's names that it loaded or unloaded when it was asked, or until the answer is noted."""

    names: set[str]


class Residents:
    """Lives on the event loop. ``on_change``: a load or unload ended, or a draining name came free.

    Attributes:
        paths: the engine's name → the staged copy it serves; tiers: → where it is, if the engine says so.
        records: the engine's name → what was loaded under it, as far as this process loaded it.
        draining: engine's names that are to be unloaded when their requests end.
        failures, phases: by public name; counters: monotonic, by metric name.
        durations: by metric name, of what succeeded.
    """

    def __init__(
        self,
        engine: Engine,
        stager: Stager,
        on_change: Callable[[], None],
        events: EventLog,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine, self._stager, self._on_change, self._clock = engine, stager, on_change, clock
        self._events = events
        self.paths: dict[str, str] = {}
        self.failures: dict[str, Failure] = {}
        self.phases: dict[str, Phase] = {}
        self.counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self.durations = {f"{kind}_seconds": Durations(clock) for kind in ("stage", "load", "unload")}
        self.draining: frozenset[str] = frozenset()
        self.records: dict[str, Record] = {}
        self._holds: Counter[str] = Counter()
        self._busy: frozenset[str] | None = frozenset()  # None: unknown
        self._used_at: dict[str, float] = {}
        self._loads: dict[tuple[str, str], asyncio.Task[str]] = {}
        self._under_load: dict[tuple[str, str], Record] = {}  # as ``_loads``
        self._doubtful: dict[str, str] = {}  # engine's name → copy, of loads whose answer did not come
        self._under_unload: dict[str, tuple[str, Record | None]] = {}  # its copy, and what was loaded
        self._stays: dict[str, Failure] = {}  # by the engine's name: why its last unload failed
        self._changing: WeakSet[Changing] = WeakSet()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # held by who uses them
        self.tiers: Mapping[str, str] = {}
        self.on_free: Callable[[], None] = lambda: None  # a copy or its adapter came out of use
        self.limit: int | None = None  # of names that the engine may have at once
        self.find_place: Callable[[Record, float], Awaitable[bool]] = _no_place
        self._taken = 0  # places of loads under way
        self._in_use: set[str] = set()  # copies, as last noted

    # -- looking -------------------------------------------------------------------------------

    def name_of(self, served: Served) -> str | None:
        """The engine's name for exactly these bytes, None if it does not hold them."""
        path, record = self._stager.path(served.record), served.record
        beside = side_name(served.name, record.revision, record.spec.digest)
        names = (served.name, beside, public_of(beside))
        return next((name for name in names if self.paths.get(name) == path), None)

    def in_flight(self, name: str) -> int:
        """Requests that need the engine's ``name``: our own, or one if the engine has some or cannot tell."""
        return self._holds[name] or int(self._busy is None or name in self._busy)

    def idle_s(self, name: str) -> float:
        """Seconds since the engine's ``name`` was last used."""
        now = self._clock()
        return now - self._used_at.setdefault(name, now)

    def waits(self, served: Served) -> bool:
        """Whether a failure of this record is waiting out its delay."""
        failure = self.failures.get(served.name)
        return failure is not None and failure.concerns(served.record) and self._clock() < failure.retry_at

    def has(self, name: str) -> bool:
        """Whether the engine has ``name``, or may have it until an unload ends."""
        return name in self.paths or name in self._under_unload

    def places(self) -> Iterator[tuple[str, str, bool]]:
        """Each name that takes a place, its copy, and whether its unload runs or waits out a delay."""
        for name, path in self.paths.items():
            failure = self._stays.get(name)
            waits = failure is not None and failure.concerns(path) and self._clock() < failure.retry_at
            yield name, path, waits
        for name, (path, _) in self._under_unload.items():
            if name not in self.paths:
                yield name, path, True

    def is_loading(self, served: Served) -> bool:
        """Whether a load of exactly these bytes is under way."""
        return (served.name, served.record.spec.digest) in self._loads

    @property
    def loading(self) -> int:
        """Loads under way."""
        return len(self._loads)

    def note_loaded(self, loaded: Loaded, meanwhile: Changing) -> None:
        """Believe the engine, except about names that were changing while it was asked."""
        changing = meanwhile.names | self._locked()
        known = {name: path for name, path in self.paths.items() if name in changing}
        for name, path in loaded.adapters.items():
            if self._stager.owns(path) and name not in changing:
                known[name] = path
        self._doubtful = {name: path for name, path in self._doubtful.items() if name in changing}
        for name in self.paths.keys() - known.keys():
            self._tell("Evicted", "the engine let it go", name)
        self.paths, self.tiers = known, loaded.tiers
        self._note_use()

    def note_activity(self, activity: Activity | None) -> None:
        """Count requests that reached the engine without the proxy as uses. None: any may be in use."""
        self._busy = activity.busy if activity is not None else None
        for name in self._busy & self.paths.keys() if self._busy is not None else ():
            self._used_at[name] = self._clock()

    def copies_in_use(self) -> set[str]:
        """Staged copies that the engine serves, or yet or soon reads."""
        going = (path for path, _ in self._under_unload.values())
        loading = map(self._stager.path, self._under_load.values())
        return {*self.paths.values(), *going, *loading, *self._doubtful.values()}

    def _note_use(self) -> None:
        """Let nobody remove what the engine has or reads; what came out of use may make room."""
        used, before = self.copies_in_use(), self._in_use
        self._in_use = used
        self._stager.use(used)
        if before - used:
            self.on_free()

    def held(self) -> Iterator[tuple[str, Record]]:
        """What the engine has, or has for a moment yet or soon, of what this process loaded: name, record."""
        yield from ((name, record) for name, record in self.records.items() if name in self.paths)
        yield from ((name, record) for (name, _), record in self._under_load.items())
        yield from ((name, record) for name, (_, record) in self._under_unload.items() if record is not None)

    def changing(self) -> Changing:
        """What an engine that is asked now may tell of as it was before; held until the answer is noted."""
        self._changing.add(changing := Changing(self._locked()))
        return changing

    def _locked(self) -> set[str]:
        return {name for name, lock in self._locks.items() if lock.locked()}

    # -- holding and loading -------------------------------------------------------------------

    @asynccontextmanager
    async def hold(self, served: Served, timeout_s: float) -> AsyncIterator[str]:
        """Keep ``served`` loaded while the context is open; yields the engine's name for it.

        Raises:
            InvalidAdapter, EngineRejected: it failed, and its delay is not over.
            TemporaryError: it could not be loaded in time.
        """
        found = self.name_of(served)
        self.counters["request_misses_total" if found is None else "request_hits_total"] += 1
        name = await self._ensure(served, timeout_s) if found is None else found
        self._holds[name] += 1
        try:
            if found is not None and self.may_reread:
                await self._make_whole(served, timeout_s)
            yield name
        finally:
            self._holds[name] -= 1
            self._used_at[name] = self._clock()
            if self._holds[name] <= 0:
                del self._holds[name]
                self.on_free()
                if name in self.draining:
                    self._on_change()

    async def _make_whole(self, served: Served, timeout_s: float) -> None:
        """Verify the copy that the engine may read again, and have it made anew if it is damaged."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._stager.stage(served.record)
        except TimeoutError as error:
            raise WaitTimeout(f"{served.name} is still staged anew after {timeout_s:.0f} s") from error

    async def _ensure(self, served: Served, timeout_s: float) -> str:
        failure = self.failures.get(served.name)
        if failure is not None and self.waits(served) and not isinstance(failure.error, TemporaryError):
            raise backoff.afresh(failure.error)
        deadline = self._clock() + timeout_s
        while True:
            try:
                async with asyncio.timeout(deadline - self._clock()):
                    name = await asyncio.shield(self.load(served))
            except TimeoutError as error:
                full = self._stager.waiting.get(self._stager.path(served.record))
                if full is not None:
                    raise backoff.afresh(full) from error
                raise WaitTimeout(f"{served.name} is still loading after {timeout_s:.0f} s") from error
            except NoSpareRoom:  # it was joined, and begun for nobody
                continue
            if self.name_of(served) == name:
                return name
            if self._clock() >= deadline:
                raise WaitTimeout(f"{served.name} was unloaded while it was waited for")

    def load(self, served: Served, *, spare: bool = False) -> asyncio.Task[str]:
        """Start to load ``served``, or join the load under way.

        Args:
            spare: nobody asked for it, and nobody makes room for it.
        """
        key = (served.name, served.record.spec.digest)
        task = self._loads.get(key)
        if task is None or task.done():  # who joined one that ended would never let it be taken away
            load = self._load(served, spare)
            task = self._loads[key] = asyncio.create_task(load, name=f"load {served.name}")
            task.add_done_callback(lambda done: self._load_done(key, done))
        return task

    def _load_done(self, key: tuple[str, str], task: asyncio.Task[str]) -> None:
        if self._loads.get(key) is task:
            del self._loads[key]
        if not task.cancelled() and task.exception() is not None:
            error = task.exception()
            told = event("load.failed", adapter=key[0], digest=key[1], error=type(error).__name__)
            logger.warning("%s is not loaded: %s", key[0], str(error), extra=told)
        self._on_change()

    async def _load(self, served: Served, spare: bool) -> str:
        record, load = served.record, (served.name, served.record.spec.digest)
        key, failure = record.key, self.failures.get(served.name)
        again = failure is not None and failure.concerns(record)
        try:
            self.phases[served.name] = Phase.VALIDATING
            self._under_load[load] = record
            self._note_use()
            with self._measured("stage", record):
                staging = self._stager.stage(record)
                self._events.tell("Retrying" if again else "Loading", key=key)
                path = await staging
            await self._take_place(served, path)
            try:
                async with self._change(served.name):
                    self.phases[served.name] = Phase.LOADING
                    name = await self._place(served, path, spare)
            finally:
                self._taken -= 1
        except LoraFsError as error:
            previous = self.failures.get(served.name)
            self.failures[served.name] = backoff.after(previous, record, error, self._clock())
            if not isinstance(error, NoSpareRoom):
                self.counters["load_failures_total"] += 1
                self._events.tell("Failed", f"{type(error).__name__}: {error}", key, warning=True)
            raise
        finally:
            self.phases.pop(served.name, None)
            del self._under_load[load]
            self._note_use()
        self.failures.pop(served.name, None)
        self.counters["loads_total"] += 1
        self._events.tell("Loaded", f"as {public_of(name)}", key)
        self._used_at[name] = self._clock()
        told = event("load.done", adapter=served.name, revision=record.revision, engine_name=name)
        logger.info("%s is loaded", served.name, extra=told)
        return name

    async def _take_place(self, served: Served, path: str) -> None:
        """Wait until one more may be loaded: what the engine does not keep it would read again in a step."""
        since = asyncio.get_running_loop().time()
        try:
            while self.limit is not None and len(self._names()) + self._taken >= self.limit:
                self._stager.waiting[path] = WaitTimeout(
                    f"no place for {served.name}: {self.limit} adapters are loaded and in use; raise "
                    "--max-loaded, up to the engine's --max-cpu-loras"
                )
                if not await self.find_place(served.record, since):
                    raise NoSpareRoom(f"no place for {served.name}: {self.limit} adapters are loaded")
        finally:
            self._stager.waiting.pop(path, None)
        self._taken += 1

    def _names(self) -> set[str]:
        """What the engine has of ours, or may have."""
        return {*self.paths, *self._under_unload, *self._doubtful}

    @property
    def may_reread(self) -> bool:
        """Whether the engine may read a copy again while it serves: it has more than it surely keeps."""
        return self._engine.rereads and (self.limit is None or len(self._names()) > self.limit)

    async def _place(self, served: Served, path: str, spare: bool) -> str:
        """Load ``path`` under the public name, or beside it while requests need the old bytes."""
        name, record, old = served.name, served.record, self.paths.get(served.name)
        if old == path:
            return name
        if old is not None and self.in_flight(name):
            beside = side_name(name, record.revision, record.spec.digest)
            async with self._change(beside):
                await self._load_as(beside, path, record, spare)
            return beside
        if old is not None:
            await self._unload(name)
            self._tell("Evicted", "another revision takes its place", name)
        try:
            await self._load_as(name, path, record, spare)
        except NameTaken as error:
            ours = error.path is not None and self._stager.owns(error.path)
            if old is not None or name in self.paths or not ours:
                raise
            self.paths[name] = str(error.path)  # it goes as any that is replaced
            self._note_use()
            return await self._place(served, path, spare)
        return name

    async def _load_as(self, name: str, path: str, record: Record, spare: bool) -> None:
        try:
            with self._measured("load", record):
                await self._engine.load(name, path, record, spare=spare)
        except (EngineRejected, NoSpareRoom):
            raise
        except BaseException:  # it may have it all the same: the next answer that comes says
            self._doubtful[name] = path
            raise
        self.paths[name], self.records[name] = path, record

    # -- unloading -----------------------------------------------------------------------------

    async def unload(self, name: str, reason: str, *, drained: bool = False) -> None:
        """Unload the engine's ``name`` unless it is in use or changing; a failure is logged and remembered.

        Args:
            drained: it was to go before, and its requests have ended now.
        """
        if self._lock(name).locked() or self.in_flight(name) or name not in self.paths:
            return
        async with self._change(name):
            if self.in_flight(name) or name not in self.paths:
                return  # who waited for the lock, too, came first
            logger.info("unloading %s: %s", name, reason, extra=event("unload", adapter=name, reason=reason))
            path = self.paths[name]
            try:
                await self._unload(name)
                self._stays.pop(name, None)
                self._tell("Drained" if drained else "Evicted", reason, name)
            except LoraFsError as error:
                self._stays[name] = backoff.after(self._stays.get(name), path, error, self._clock())
                told = event("unload.failed", adapter=name, error=type(error).__name__)
                logger.warning("%s stays loaded: %s", name, error, extra=told)
        self._on_change()

    async def _unload(self, name: str) -> None:
        path, record = self.paths.pop(name), self.records.get(name)  # at once: a request now loads it again
        self._under_unload[name] = path, record
        try:
            with self._measured("unload", record):
                await self._engine.unload(name)
        except BaseException:  # who is cancelled does not know either whether the engine let it go
            self.paths.setdefault(name, path)
            raise
        finally:
            del self._under_unload[name]
            self._note_use()
        self.counters["unloads_total"] += 1
        self.failures = {n: f for n, f in self.failures.items() if not isinstance(f.error, NoSpareRoom)}

    # -- forgetting ----------------------------------------------------------------------------

    def forget(self, name: str) -> None:
        """The engine does not have ``name`` after all, nor these bytes under another."""
        path = self.paths.pop(name, None)
        self.paths = {other: at for other, at in self.paths.items() if at != path}
        self._note_use()

    def keep_only(self, is_served: Callable[[str], bool]) -> None:
        """Keep no state for names that are neither served nor loaded."""
        self.failures = {name: f for name, f in self.failures.items() if is_served(name)}
        self.records = {name: record for name, record in self.records.items() if self.has(name)}
        self._used_at = {name: at for name, at in self._used_at.items() if self.has(name)}
        self._stays = {name: failure for name, failure in self._stays.items() if self.has(name)}

    @contextmanager
    def _measured(self, what: str, record: Record | None) -> Iterator[None]:
        adapter = str(record.key) if record is not None else "unknown"
        with tracing.span(what, lora_fs__adapter=adapter), self.durations[f"{what}_seconds"].measured():
            yield

    def _tell(self, reason: str, message: str, name: str) -> None:
        record = self.records.get(name)
        known = (message, record.key) if record is not None else (f"{public_of(name)}: {message}", None)
        self._events.tell(reason, *known)

    @asynccontextmanager
    async def _change(self, name: str) -> AsyncIterator[None]:
        """Lock the engine's ``name``, and let questions to the engine that are under way know of it."""
        async with self._lock(name):
            try:
                yield
            finally:
                for one in self._changing:
                    one.names.add(name)

    def _lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())


async def _no_place(record: Record, since: float) -> bool:
    return False
