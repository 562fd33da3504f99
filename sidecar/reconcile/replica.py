"""One replica: the desired state in memory, the engine beside it, and the loop between them.

All state lives on the event loop; the disk is touched in threads only (``volume``, ``staging``,
``registrations``). Level-triggered: a wake-up only starts a pass, and every pass reads the
engine again.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial

import anyio.to_thread

from lora_fs.sidecar import tracing
from lora_fs.sidecar.engine.protocol import Activity, Engine, Loaded
from lora_fs.sidecar.errors import EngineUnavailable, LoraFsError, NotFound, TemporaryError, WaitTimeout
from lora_fs.sidecar.logs import event
from lora_fs.sidecar.model import AdapterKey, AdapterStatus, Condition, Download, JsonObject, Policy, Record
from lora_fs.sidecar.reconcile import figures, plan, status
from lora_fs.sidecar.reconcile.admin.service import LoadRequest, Registrations
from lora_fs.sidecar.reconcile.admin.uploads import Upload
from lora_fs.sidecar.reconcile.catalog import Catalog, Served, build, find, is_withdrawn, public_name
from lora_fs.sidecar.reconcile.engine_state import Residents
from lora_fs.sidecar.reconcile.eviction import Room
from lora_fs.sidecar.reconcile.foreign import Foreign
from lora_fs.sidecar.reconcile.stage.jobs import Stager
from lora_fs.sidecar.reconcile.stage.prefetch import Ahead
from lora_fs.sidecar.reconcile.subjects import Subjects
from lora_fs.sidecar.reconcile.telemetry.conditions import Readiness, Since
from lora_fs.sidecar.reconcile.telemetry.durations import Durations
from lora_fs.sidecar.reconcile.telemetry.events import EventLog, News
from lora_fs.sidecar.reconcile.telemetry.request_counts import Tally
from lora_fs.sidecar.reconcile.watch.watcher import Volume
from lora_fs.sidecar.reconcile.worker import Kind, Work, Workers
from lora_fs.sidecar.registry.lifecycle.ingest import Registered
from lora_fs.sidecar.registry.view.snapshot import Desired, touched

logger = logging.getLogger(__name__)

ENGINE_RETRY_S = 0.5
GATHER_S = 0.15  # a burst of changes is one pass, after the list was told; no request waits for a pass
UNASKED_LOADS = 4  # at once, so that a boot with many eager adapters leaves room for requests
UNLOADS = 8

_MAY_REREAD = (
    "EngineMayReread: it is unknown how many adapters the engine keeps in memory, and it ends if it reads a "
    "damaged staged copy again: set LORA_FS_MAX_LOADED, at most to its --max-cpu-loras"
)


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds and defaults, from the settings."""

    default_policy: Policy
    max_loaded: int | None
    resync_s: float
    hold_timeout_s: float
    weights: Mapping[str, int] = field(default_factory=dict)  # of namespaces


class Replica:
    """Implements ``server.ports.ReplicaPort``. ``on_pass`` is called after every pass."""

    def __init__(
        self,
        replica_id: str,
        model: str,
        namespaces: tuple[str, ...],
        volume: Volume,
        registrations: Registrations,
        engine: Engine,
        stager: Stager,
        limits: Limits,
        on_pass: Callable[[Replica], None] = lambda _: None,
        ahead: Ahead | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.replica_id, self.model, self.namespaces = replica_id, model, namespaces
        self._volume, self._registrations, self._engine = volume, registrations, engine
        self._stager, self._limits, self._on_pass, self._clock = stager, limits, on_pass, clock
        self._ahead = ahead
        self._wake = asyncio.Event()
        self._moved = asyncio.Event()  # set once, and replaced, at whatever may let a waiter go on
        self._workers = Workers({Kind.UNLOAD: UNLOADS, Kind.LOAD: UNASKED_LOADS})
        self.events = EventLog()
        self._residents = Residents(engine, stager, self.wake, self.events, clock)
        self._catalog = Catalog()
        self._built_from: tuple[int, frozenset[str]] | None = None
        self._engine_view: Loaded | None = None
        self._foreign = Foreign()
        self.engine_names: frozenset[str] = frozenset()  # its own; may be told before it answers
        self._engine_problem: str | None = "the engine has not answered yet"
        self._ended: str | None = None  # why the loop ended, which is never meant
        self._max_loras: int | None = None  # of one batch
        self._slots: int | None = None  # where the engine has no more than these
        self._passes = Durations(clock)
        self._tally = Tally()
        self._kept_for: Desired | None = None  # of what is not in it, nothing is remembered
        self._since = Since()
        self._news = News(self.events)
        self._subjects = Subjects(
            namespaces, self._residents, stager, limits.default_policy, limits.max_loaded
        )
        self._pin_problem: str | None = None
        self._activity_problem: str | None = None
        self._keeps: int | None = None  # how many adapters the engine keeps in memory, as it said
        read, look, default = self._read_engine, self._resident, limits.default_policy
        self._room = Room(self._residents, stager, read, look, default, limits.weights)

    # -- what the routes ask: from memory ----------------------------------------------------

    def catalog(self) -> Catalog:
        desired = self._volume.desired
        key = (desired.version, self.engine_names)
        if self._built_from != key:
            before, default = self._catalog, self._limits.default_policy
            self._catalog = build(
                desired, self.namespaces, self.engine_names, before.version + 1, default, before
            )
            self._built_from = key
        return self._catalog

    def lookup(self, name: str) -> Served | None:
        return find(self.catalog(), self._volume.desired, self.model, self.namespaces, name)

    def check_read(self) -> None:
        self._volume.check_read()

    def choose(self, served: Served, user: str | None) -> Served:
        chosen = self.catalog().choose(served, user, random.random)
        self._kept_for = self._kept_for or self._volume.desired
        self._tally.count(chosen)
        return chosen

    def requests(self) -> Mapping[tuple[str, str], int]:
        held, trials = set(self._residents.paths.values()), self.catalog().trials

        def told(name: str, key: AdapterKey) -> bool:
            record = self._volume.desired.records.get(key)
            loaded = record is not None and record.present and self._stager.path(record) in held
            return loaded or name in trials

        return self._tally.of({*trials, *(name.partition("@")[0] for name in self._residents.paths)}, told)

    def base_cards(self) -> tuple[JsonObject, ...]:
        return self._foreign.cards

    def passes_through(self, name: str) -> bool:
        return name in self.engine_names

    def kept_to(self, name: str) -> str | None:
        desired = self._volume.desired if self._volume.read_once else None
        return self._foreign.kept_to(name, desired, self.model, self.namespaces)

    def statuses(self) -> Mapping[str, AdapterStatus]:
        return status.statuses(self.catalog(), self._residents, self._clock())

    def notable(self) -> tuple[Mapping[str, AdapterStatus], Mapping[str, int]]:
        """The statuses worth telling, and how many adapters are in each phase."""
        told = status.notable(self.catalog(), self._residents, self._clock())
        return told, status.counts(self.catalog(), told)

    def dated(self, told: Mapping[str, AdapterStatus]) -> Mapping[str, AdapterStatus]:
        """The notable statuses, each with the time since which its phase is what it is."""
        return self._since.stamp(told)

    def conditions(self, name: str, one: AdapterStatus) -> tuple[Condition, ...]:
        return self._since.conditions(name, one)

    def residency(self) -> Mapping[str, JsonObject]:
        return figures.residency(self._residents, self.catalog())

    def downloads(self) -> Mapping[str, Download]:
        return self._registrations.downloads.under_way()

    def end(self) -> None:
        """Let what goes on in threads end soon."""
        self._registrations.downloads.stop()

    def staged(self, served: Served) -> bool:
        return self._stager.has(served.record)

    def capacity(self) -> int | None:
        return self._limits.max_loaded or self._slots

    def readiness(self) -> Readiness:
        conditions, problem = list(self._volume.conditions()), self._ended or self._engine_problem
        if problem is not None:
            conditions.append(f"EngineUnavailable: {problem}")
        conditions += [one for one in (self._pin_problem, self._activity_problem) if one is not None]
        if problem is None and self._engine.rereads and self._residents.limit is None:
            conditions.append(_MAY_REREAD)
        return Readiness(problem is None and self._volume.read_once, tuple(conditions))

    def counters(self) -> Mapping[str, float]:
        return dict(self._residents.counters)

    def durations(self) -> Mapping[str, Durations]:
        return {"pass_seconds": self._passes, **self._residents.durations}

    def figures(self) -> Mapping[str, float]:
        known = {"capacity": self.capacity(), "max_loras": self._max_loras}
        return figures.numbers(self._residents, self._stager, known)

    def tiers(self) -> Mapping[str, int]:
        return figures.tiers(self._residents, self._stager)

    # -- what the routes do --------------------------------------------------------------------

    @asynccontextmanager
    async def hold(self, name: str, timeout_s: float) -> AsyncIterator[str]:
        served = self.lookup(name)
        if served is None:
            self.check_read()
            raise NotFound(f"The model `{name[:200]}` does not exist.")
        with self._room.asked(served.record):
            async with self._residents.hold(served, timeout_s) as engine_name:
                yield engine_name

    def forget(self, engine_name: str) -> None:
        self._residents.forget(engine_name)
        self.wake()

    async def load_adapter(self, request: LoadRequest, *, writer: str) -> Record:
        record, undo = await self._registrations.register(request, writer)
        try:
            async with self.hold(request.lora_name, self._limits.hold_timeout_s):
                return record
        except TemporaryError as error:
            raise WaitTimeout(
                f"{request.lora_name} is registered and not loaded here yet: {error}"
            ) from error
        except LoraFsError:
            await undo()
            raise

    async def upload(self, upload: Upload, *, writer: str) -> Registered:
        return await self._registrations.upload(upload, writer)

    async def unload_adapter(self, lora_name: str, *, writer: str) -> None:
        served = self.lookup(lora_name)
        if served is None:
            self.check_read()
        await self._registrations.unregister(lora_name, served, writer)
        try:
            async with asyncio.timeout(self._limits.hold_timeout_s):
                await self.reconcile()
                while self._residents.has(lora_name) and self.lookup(lora_name) is None:
                    await self._moved.wait()
        except TimeoutError as error:
            why = "its last requests are still draining here, or the engine has not unloaded it"
            raise WaitTimeout(f"{lora_name} is withdrawn; {why}") from error

    # -- the loop ------------------------------------------------------------------------------

    def wake(self) -> None:
        """Start a pass soon, and let those who wait for a change look again. Call on the event loop."""
        self._wake.set()
        self._look_again()

    def _look_again(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()

    async def run(self) -> None:
        """Reconcile until cancelled; a pass that fails is told, and the next one comes.

        Should the loop itself fail, this replica is not ready from then on.
        """
        try:
            while True:
                self._wake.clear()
                with self._goes_on():
                    with tracing.span("reconcile", lora_fs__replica=self.replica_id), self._passes.measured():
                        await self.reconcile()
                    if self._engine_problem is None and self._volume.read_once:
                        await anyio.to_thread.run_sync(self._stager.sweep, self.catalog().digests)
                with self._goes_on():  # apart, so that a pass that failed is told of
                    if self._ahead is not None and self._volume.read_once:
                        self._ahead.look(self.catalog())
                    self._news.troubles(self.readiness().conditions)
                    self._on_pass(self)
                pause_s = self._limits.resync_s if self._engine_problem is None else ENGINE_RETRY_S
                with anyio.move_on_after(pause_s):
                    await self._wake.wait()
                    await asyncio.sleep(GATHER_S)
        except Exception as error:
            self._ended = f"internal error: the reconcile loop ended, restart this replica: {error!r}"
            raise
        finally:
            self._workers.stop()

    @contextmanager
    def _goes_on(self) -> Iterator[None]:
        """What fails within is told as a condition, and the loop goes on."""
        try:
            yield
        except Exception as error:
            logger.exception("a pass failed and the loop goes on", extra=event("pass.failed"))
            self._engine_problem = f"internal error: {error!r}"

    async def reconcile(self) -> None:
        """One pass: read the engine, decide, and hand the acts to the workers."""
        try:
            await self._read_engine()
        except EngineUnavailable as error:
            self._engine_problem = str(error)
            self._workers.follow({})  # what it has is unknown: nothing begins
            return
        self._engine_problem = None
        if not self._volume.read_once:
            return
        catalog, limits = self.catalog(), self._limits
        self._news.written(self._volume.desired)
        self._pin_problem = self._subjects.pin_problem(catalog, self.capacity())
        resident = self._resident()
        self._engine.prefer({entry.name: entry.policy for entry in resident})
        absent = self._subjects.absent(catalog, self.lookup)
        decided = plan.decide(resident, absent, self._residents.limit, limits.weights)
        self._workers.follow(self._work(decided, len(resident)))
        self._forget()
        self._look_again()

    def _work(self, decided: plan.Plan, taken: int) -> dict[Kind, dict[str, Work]]:
        """What the workers do. A load whose place an unload frees waits for the pass after that unload.

        Args:
            taken: places that are taken now.
        """
        residents, limit = self._residents, self._residents.limit
        drained = residents.draining & decided.unload.keys()
        residents.draining = drained.union(decided.draining)
        unloads: dict[str, Work] = {
            name: partial(residents.unload, name, reason, drained=name in drained)
            for name, reason in decided.unload.items()
        }
        loads: dict[str, Work] = {}
        free = len(decided.load) if limit is None else limit - taken - residents.loading
        for name in decided.load:
            served = self.lookup(name)
            if served is None or residents.is_loading(served) or (free <= 0 and name not in unloads):
                continue
            free -= int(name not in unloads)
            loads[name] = partial(self._load, served, spare=name in decided.spare)
        return {Kind.UNLOAD: unloads, Kind.LOAD: loads}

    async def _load(self, served: Served, *, spare: bool) -> None:
        await asyncio.shield(self._residents.load(served, spare=spare))

    def _resident(self) -> list[plan.Resident]:
        desired = self._volume.desired
        return self._subjects.resident(
            self.catalog(), self.lookup, lambda name: is_withdrawn(desired, self.model, self.namespaces, name)
        )

    def _forget(self) -> None:
        """Keep nothing of what is not served any more, of what changed since the last pass."""
        after = self._volume.desired
        before, self._kept_for = self._kept_for or after, after
        moved = touched(before.pointers, after.pointers)
        changed = {public_name(scope, name, self.namespaces) for scope, name in moved}
        for key in touched(before.records, after.records):
            name, record = public_name(key.scope, key.name, self.namespaces), after.records.get(key)
            changed |= {name, f"{name}@{key.revision}"}
            if record is None or not record.present:
                self._tally.drop(name, key)
        self._residents.keep_only(lambda name: self.lookup(name) is not None)
        self._since.keep_only(lambda name: self.lookup(name) is not None, changed)

    async def _read_engine(self) -> None:
        changing = self._residents.changing()
        loaded = await self._engine.loaded()
        self._residents.note_loaded(loaded, changing)
        await self._read_activity(swaps=not loaded.tiers)
        await self._bound(len(loaded.adapters))
        if loaded != self._engine_view:
            self._foreign = Foreign.of(loaded, self._stager.owns)
            self.engine_names, self._engine_view = self._foreign.names, loaded

    async def _bound(self, has: int) -> None:
        """Learn once how many adapters an engine keeps in memory; those from elsewhere take places there.

        Args:
            has: how many adapters the engine has, whose ever they are.
        """
        if self._limits.max_loaded is None and self._engine.rereads and self._engine_problem is not None:
            self._keeps = await self._engine.holds_most()
        elsewhere = has - len(self._residents.paths)
        learned = max(1, self._keeps - elsewhere) if self._keeps is not None else None
        self._residents.limit = self._limits.max_loaded or learned

    async def _read_activity(self, *, swaps: bool) -> None:
        """``swaps``: a stock engine's adapters take turns, so that one batch's number bounds nothing."""
        if not self._residents.paths:
            self._activity_problem = None
            return self._residents.note_activity(Activity())
        try:
            activity = await self._engine.activity()
        except EngineUnavailable as error:
            self._activity_problem = f"ActivityUnknown: nothing is unloaded until it is known: {error}"
            return self._residents.note_activity(None)
        self._activity_problem = None
        self._residents.note_activity(activity)
        self._max_loras = activity.max_loras
        if not swaps:
            self._slots = activity.max_loras
