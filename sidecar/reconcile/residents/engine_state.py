"""What the engine holds, as this process knows it: names, staged copies, and the requests that use them.

A name that the engine loaded from elsewhere than the stage folder is not ours and is left alone.
``loading`` loads and unloads.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from lora_fs.sidecar.engine.protocol import Activity, Engine, Loaded
from lora_fs.sidecar.errors import EngineRejected, EngineUnavailable, NoSpareRoom
from lora_fs.sidecar.model import Phase, Record, engine_name, public_of
from lora_fs.sidecar.reconcile.catalog import Served
from lora_fs.sidecar.reconcile.residents import backoff
from lora_fs.sidecar.reconcile.residents.backoff import Failure
from lora_fs.sidecar.reconcile.residents.effect import Effect, Scores
from lora_fs.sidecar.reconcile.residents.engine_memory import EngineMemory
from lora_fs.sidecar.reconcile.residents.foreign import copy_of
from lora_fs.sidecar.reconcile.residents.name_locks import Changing, NameLocks
from lora_fs.sidecar.reconcile.stage.jobs import Stager
from lora_fs.sidecar.reconcile.telemetry.durations import Durations
from lora_fs.sidecar.reconcile.telemetry.events import EventLog
from lora_fs.sidecar.reconcile.telemetry.usage import UsageCounters

# From the first scrape on: of a series that begins at 1 Prometheus sees no increase.
_LOADS = ("loads_total", "load_failures_total", "unloads_total")
COUNTERS = (*_LOADS, "request_hits_total", "request_misses_total")
LOST_S = 5.0  # what the engine lets go so soon, time and again, nobody loads at once without a request
RESTARTS = 2  # of an engine, that delay nothing


class EngineState:
    """The state of one engine, as far as known. Lives on the event loop.

    Attributes:
        paths: the engine's name → the staged copy it serves; tiers: → where it is, if the engine says so.
        elsewhere: the engine's name → the digest of the copy it serves, of another stage folder.
        records: the engine's name → the record loaded under it, if this process loaded or recognised it.
        draining: engine's names to unload when their requests end.
        unplaced: names to load before any request, but not here: other replicas are their homes.
        failures, phases: by public name; counters: monotonic, by metric name.
        durations: by metric name, of successes; usage: by revision.
        limit: of names that the engine may have at once; None if there is no bound.
        effects: by digest, whether these bytes change an answer, if known.
        base_scores: by prompt, what the base model says to it while no adapter is in use.
        lost: the engine dropped a name that nobody unloaded, since the last reset: it may have restarted.
        signer_of: returns who signed a record's bytes, as of the last check.
        on_free: called when a copy or its adapter comes out of use.
    """

    def __init__(
        self,
        engine: Engine,
        stager: Stager,
        events: EventLog,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine, self._stager, self._events, self._clock = engine, stager, events, clock
        self.locks = NameLocks()
        self.paths: dict[str, str] = {}
        self.elsewhere: dict[str, str] = {}
        self.tiers: Mapping[str, str] = {}
        self.records: dict[str, Record] = {}
        self.draining: frozenset[str] = frozenset()
        self.failures: dict[str, Failure] = {}
        self.phases: dict[str, Phase] = {}
        self.unplaced: frozenset[str] = frozenset()
        self.counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self.durations = {f"{kind}_seconds": Durations(clock) for kind in ("stage", "load", "unload")}
        self.usage = UsageCounters()
        self.effects: dict[str, Effect] = {}
        self.base_scores: dict[str, Scores] = {}
        self.lost = False
        self.limit: int | None = None
        self._memory = EngineMemory()
        self.on_free: Callable[[], None] = lambda: None
        self._holds: Counter[str] = Counter()
        self._busy: frozenset[str] | None = frozenset()  # None: unknown
        self._ours: frozenset[str] = frozenset()  # of them, at the last look those that our own requests used
        self._used_at: dict[str, float] = {}
        self._loads: dict[tuple[str, str], asyncio.Task[str]] = {}
        self.signer_of = stager.trusted.signer_of
        self._under_load: dict[tuple[str, str], Record] = {}  # as ``_loads``
        self._doubtful: dict[str, str] = {}  # engine's name → copy, of loads whose answer did not come
        self._under_unload: dict[str, tuple[str, Record | None]] = {}  # its copy and its record
        self._stays: dict[str, Failure] = {}  # by the engine's name: why its last unload failed
        self._lost: dict[str, Failure] = {}  # by public name: let go within LOST_S of its load or use
        self._logged: dict[str, tuple[str, float]] = {}  # by public name: a load's failure, and when
        self._in_use: set[str] = set()  # copies, as last noted

    def name_of(self, served: Served) -> str | None:
        """The engine's name for exactly these bytes, None if it does not hold them."""
        path, digest = self._stager.path(served.record), served.record.spec.digest
        of_revision = f"{served.name.partition('@')[0]}@{served.record.revision}"
        for name in (engine_name(served.name, digest), engine_name(of_revision, digest)):
            if self.paths.get(name) == path or self.elsewhere.get(name) == digest:
                return name
        return None

    @property
    def is_idle(self) -> bool:
        """Whether nobody uses any adapter, as far as the sidecar and the engine's metrics know."""
        return not self._holds and self._busy == frozenset()

    def in_flight(self, name: str) -> int:
        """Requests that need the engine's ``name``: our own, or one if the engine has some or cannot tell."""
        return self._holds[name] or int(self._busy is None or name in self._busy)

    def idle_s(self, name: str) -> float:
        """Seconds since the engine's ``name`` was last used; 0 while our own requests use it."""
        now = self._clock()
        if self._holds[name]:
            return 0.0
        return now - self._used_at.setdefault(name, now)

    def waits(self, served: Served) -> bool:
        """Whether a failure of this record is waiting out its delay."""
        failure = self.failures.get(served.name)
        return failure is not None and failure.concerns(served.record) and self._clock() < failure.retry_at

    def is_let_go(self, served: Served) -> bool:
        """Whether the engine lets it go time and again, and the delay since the last time goes on."""
        lost = self._lost.get(served.name)
        if lost is None or lost.attempts <= RESTARTS or not lost.concerns(served.record):
            return False
        return self._clock() < lost.retry_at

    def revisions_of(self, plain: str) -> Iterator[str]:
        """The public names under which ``has`` is true of an adapter's bytes: plain, or with a revision."""
        publics = map(public_of, (*self.paths, *self._under_unload))
        return (public for public in publics if public.partition("@")[0] == plain)

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
        """Believe the engine, except about names that changed during the call."""
        changing = meanwhile.names | self.locks.locked()
        known = {name: path for name, path in self.paths.items() if name in changing}
        self.elsewhere = {}
        for name, path in loaded.adapters.items():
            if not self._stager.owns(path):
                if (digest := copy_of(name, path)) is not None:
                    self.elsewhere[name] = digest
            elif name not in changing:
                known[name] = path
        self._doubtful = {name: path for name, path in self._doubtful.items() if name in changing}
        for name in self.paths.keys() - known.keys():
            self.lost = True
            self._memory.unloaded(name, self._clock() - self.idle_s(name))
            self._tell("Evicted", "the engine let it go", name)
            self._note_lost(name)
        self.paths, self.tiers = known, loaded.tiers
        self._note_use()

    def _note_lost(self, name: str) -> None:
        """Count how often the engine lets go what it just took: it may answer 200 and load nothing."""
        record, public, now = self.records.get(name), public_of(name), self._clock()
        before = self._lost.pop(public, None)
        if record is not None and self.idle_s(name) < LOST_S:
            if before is not None and now - before.retry_at > backoff.CEILING_S:
                before = None
            self._lost[public] = backoff.after(before, record, EngineUnavailable("it let it go"), now)

    def requested(self) -> frozenset[str]:
        """The engine's names that our own requests use."""
        return frozenset(self._holds)

    def note_activity(self, activity: Activity | None, ours: frozenset[str] = frozenset()) -> None:
        """Count requests that reached the engine without the proxy as uses. None: any may be in use.

        Until the next look at what is in use, our own requests alone say how long theirs are.

        Args:
            ours: what our own requests used when the look began.
        """
        if activity is not None and activity.is_new:
            self._ours = activity.busy & (ours | self.requested())
        self._busy = None
        if activity is not None:
            self._busy = activity.busy if activity.is_new else activity.busy - self._ours
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

    def _note_load(self, path: str) -> None:
        """Let nobody remove the copy of a load that begins: as ``_note_use``, whatever else is loaded."""
        if path not in self._in_use:
            self._in_use.add(path)
            self._stager.use_also(path)

    def held(self) -> Iterator[tuple[str, Record]]:
        """What the engine has, or has for a moment yet or soon, of what has a record: name, record."""
        yield from ((name, record) for name, record in self.records.items() if name in self.paths)
        yield from ((name, record) for (name, _), record in self._under_load.items())
        yield from ((name, record) for name, (_, record) in self._under_unload.items() if record is not None)

    def _count(self, but: str | None = None) -> int:
        """How many of our adapters the engine has, or may have. It lists none of them: each request asks."""
        leaving = {name for name in (*self._under_unload, *self._doubtful) if name not in self.paths}
        return len(self.paths) - (but in self.paths) + len(leaving - {but})

    def may_reread(self, name: str) -> bool:
        """Whether the engine may read ``name``'s copy again while it serves: it is not sure to keep it."""
        if not self._engine.rereads:
            return False
        return self.limit is None or not self._memory.surely_keeps(name, self._count(name), self.limit)

    def may_be_dropped(self, name: str) -> bool:
        """Whether the engine may have dropped ``name`` even if it computed each request that ended."""
        return self.limit is not None and not self._memory.likely_keeps(name, self._count(name), self.limit)

    def forget(self, name: str) -> None:
        """The engine does not have ``name`` after all, nor these bytes under another."""
        self.lost = True
        self.elsewhere.pop(name, None)
        path = self.paths.pop(name, None)
        self.paths = {other: at for other, at in self.paths.items() if at != path}
        self._note_use()

    def try_again(self) -> None:
        """Let loads that the engine refused be tried at once: it may have restarted, with other options.

        Not those that it did not answer: they may have ended it.
        """
        now, refusals = self._clock(), (EngineRejected, NoSpareRoom)
        self.failures = {
            name: replace(f, retry_at=min(f.retry_at, now)) if isinstance(f.error, refusals) else f
            for name, f in self.failures.items()
        }

    def keep_only(self, is_served: Callable[[str], bool]) -> None:
        """Keep no state for names that are neither served nor loaded."""
        self.failures = {name: f for name, f in self.failures.items() if is_served(name)}
        self._lost = {name: failure for name, failure in self._lost.items() if is_served(name)}
        self._logged = {name: logged for name, logged in self._logged.items() if is_served(name)}
        self.records = {name: record for name, record in self.records.items() if self.has(name)}
        self._used_at = {name: at for name, at in self._used_at.items() if self.has(name)}
        self._stays = {name: failure for name, failure in self._stays.items() if self.has(name)}

    def _tell(self, reason: str, message: str, name: str) -> None:
        record = self.records.get(name)
        known = (message, record.key) if record is not None else (f"{public_of(name)}: {message}", None)
        self._events.tell(reason, *known)
