"""The loop between the volume and the engine: a pass reads both, decides by ``plan``, and hands over.

Level-triggered: a wake-up only starts a pass, and every pass reads the engine again. A ``worker`` per adapter
does the work, so that no pass waits for a load or an unload. All state lives on the event loop; only threads
touch the disk.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

import anyio

from lora_fs.sidecar import tracing
from lora_fs.sidecar.concurrency import Daemons
from lora_fs.sidecar.engine.protocol import Activity, Engine, Facts, Loaded, Queue
from lora_fs.sidecar.errors import EngineUnavailable
from lora_fs.sidecar.logs import event
from lora_fs.sidecar.model import Policy
from lora_fs.sidecar.reconcile import plan
from lora_fs.sidecar.reconcile.catalog import Served
from lora_fs.sidecar.reconcile.names import Names
from lora_fs.sidecar.reconcile.residents.foreign import Foreign
from lora_fs.sidecar.reconcile.residents.loading import Residents
from lora_fs.sidecar.reconcile.stage.jobs import Stager
from lora_fs.sidecar.reconcile.subjects import PartOf, Subjects
from lora_fs.sidecar.reconcile.telemetry.durations import Durations
from lora_fs.sidecar.reconcile.watch.watcher import Volume
from lora_fs.sidecar.reconcile.worker import Kind, Work, Workers
from lora_fs.sidecar.validate import version_problem

logger = logging.getLogger(__name__)

ENGINE_RETRY_S = 0.5
SWEEP_S = 1.0  # a pass waits so long for the stage folder, which another process may hold, or its disk
SWEEP_SHARE = 50  # a sweep, which looks at every copy, takes at most 1/50 of the time; passes may come faster
GATHER_S = 0.15  # a burst of changes is one pass, after the list is published; no request waits for a pass
UNASKED_LOADS = 4  # at once, so that a boot with many eager adapters leaves room for requests
UNLOADS = 8
MAY_REREAD = (
    "EngineMayReread: it is unknown how many adapters the engine keeps in memory, and it ends if it reads a "
    "damaged staged copy again: set LORA_FS_MAX_LOADED, at most to its --max-cpu-loras"
)
VERSION_UNKNOWN = (
    "adapters that vLLM serves right only since a certain version are refused (engine-too-old): serve with a "
    "released vLLM"
)
ONE_AT_A_TIME = (
    "OneAtATime: the engine says of one adapter alone that it keeps it in memory, so that one is loaded at a "
    "time: start it with --max-cpu-loras N, and set LORA_FS_MAX_LOADED to N"
)


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds and defaults, from the settings."""

    default_policy: Policy
    max_loaded: int | None
    resync_s: float
    hold_timeout_s: float
    weights: Mapping[str, int] = field(default_factory=dict)  # of namespaces
    part_of: PartOf | None = None  # None: every replica is a home of every adapter


class Reconciler:
    """The reconcile loop of one replica.

    Args:
        on_decided: called in a pass once it has decided; after_pass: after every pass, failed ones included.

    Attributes:
        decided: whether a pass decided: later registrations did not exist at the start.
        foreign: names that the engine lists and this replica did not load.
        max_loras: how many adapters one batch may mix; slots: how many the engine loads at most, if it
            are. None where the engine does not say.
        queue: the engine's requests, as it said last; None if it did not say.
        passes: how long they took.
        version: what the engine said last that its version is; None: nothing.
    """

    def __init__(
        self,
        replica_id: str,
        names: Names,
        volume: Volume,
        engine: Engine,
        stager: Stager,
        residents: Residents,
        limits: Limits,
        on_decided: Callable[[], None],
        after_pass: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._replica_id, self._names, self._volume, self._engine = replica_id, names, volume, engine
        self._stager, self._residents, self._limits, self.passes = stager, residents, limits, Durations(clock)
        self._on_decided, self._after_pass, self._clock = on_decided, after_pass, clock
        self._wake = asyncio.Event()
        self._moved = asyncio.Event()  # set once, and replaced, at whatever may let a waiter go on
        self._workers = Workers({Kind.UNLOAD: UNLOADS, Kind.LOAD: UNASKED_LOADS})
        self._sweeper = Daemons(1, "lora-fs-sweep")
        self._sweeping: asyncio.Task[None] | None = None
        self._sweep_at = clock()
        self._subjects = Subjects(names, residents, stager, limits.max_loaded, limits.part_of)
        self.decided = False
        self.foreign = Foreign()
        self.max_loras: int | None = None
        self.queue: Queue | None = None
        self.slots: int | None = None
        self._engine_view: Loaded | None = None
        self._problem: str | None = "the engine has not answered yet"
        self._cannot_load: str | None = None  # why the engine, which answers, can load no adapter
        self._ended: str | None = None  # why the loop ended, which is never meant
        self._pin_problem: str | None = None
        self._activity_problem: str | None = None
        self.version: str | None = None
        self._to_ask_version = True
        self._keeps: int | None = None  # how many adapters the engine keeps in memory, as it said
        self._to_ask = True  # for the bound: this engine was not asked yet, or did not answer
        residents.limit = limits.max_loaded

    @property
    def ready(self) -> bool:
        """Whether the engine answers and can load adapters, and the loop runs."""
        return (self._ended or self._problem or self._cannot_load) is None

    def conditions(self) -> Iterator[str]:
        """The faults of the engine and the loop, for people."""
        if (self._ended or self._problem) is not None:
            yield f"EngineUnavailable: {self._ended or self._problem}"
        elif self._cannot_load is not None:
            yield f"NoRuntimeLoading: {self._cannot_load}"
        problem = version_problem(self.version)
        if self._problem is None and problem is not None:
            yield f"EngineVersionUnknown: {problem}: {VERSION_UNKNOWN}"
        yield from (one for one in (self._pin_problem, self._activity_problem) if one is not None)
        if self.ready and self._engine.rereads and self._residents.limit is None:
            yield MAY_REREAD
        if self._keeps is not None and self.capacity() == 1 and len(self._names.catalog().served) > 1:
            yield ONE_AT_A_TIME
        if self.decided and not self._volume.desired.records:
            yield from self.foreign.model_problem(self._names.terms.model)

    def facts(self) -> tuple[Facts, str | None, bool | None]:
        """What the engine says of itself, its version, whether it loads adapters; unknown while silent."""
        if self._engine_view is None or (self._ended or self._problem) is not None:
            return Facts(), None, None
        return self._engine_view.facts, self.version, self._cannot_load is None

    def capacity(self) -> int | None:
        """How many adapters the engine may have at once; None: no bound."""
        return self._residents.limit or self.slots

    def wake(self) -> None:
        """Start a pass soon, and let those who wait for a change look again. Call on the event loop."""
        self._wake.set()
        self._look_again()

    def engine_failed(self, problem: str | None) -> None:
        """Be unready for ``problem`` until a pass has read the engine, and start one soon."""
        self._problem = problem or self._problem
        self.wake()

    async def changed(self) -> None:
        """Wait until something changed: a pass, a load or an unload ended, or the volume was read anew."""
        await self._moved.wait()

    def _look_again(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()

    async def run(self) -> None:
        """Make passes until cancelled. If the loop itself fails, the replica is not ready from then on."""
        try:
            while True:
                self._wake.clear()
                with self._goes_on():
                    with tracing.span("reconcile", lora_fs__replica=self._replica_id), self.passes.measured():
                        await self.reconcile()
                    if self._problem is None and self._volume.read_once:
                        await self._sweep()
                with self._goes_on():  # apart, so that the status reports a failed pass
                    self._after_pass()
                pause_s = self._limits.resync_s if self.ready else ENGINE_RETRY_S
                with anyio.move_on_after(pause_s):
                    await self._wake.wait()
                    await asyncio.sleep(GATHER_S if self.decided else 0)
        except Exception as error:
            self._ended = f"internal error: the reconcile loop ended, restart this replica: {error!r}"
            raise
        finally:
            self._workers.stop()
            if self._sweeping is not None:
                self._sweeping.cancel()

    async def _sweep(self) -> None:
        """Sweep the stage folder, unless the last time goes on yet, or took long and ended just now."""
        if self._clock() >= self._sweep_at and (self._sweeping is None or self._sweeping.done()):
            sweep = partial(self._sweep_now, self._names.copies())
            self._sweeping = asyncio.create_task(self._sweeper.run(sweep), name="sweep")
            await asyncio.wait({self._sweeping}, timeout=SWEEP_S)
            if self._sweeping.done():
                self._sweeping.result()

    def _sweep_now(self, registered: Container[str]) -> None:
        """Sweep, and say when the next sweep is due. Blocks."""
        began = self._clock()
        self._stager.sweep(registered)
        now = self._clock()
        self._sweep_at = now + min(SWEEP_SHARE * (now - began), self._limits.resync_s)

    @contextmanager
    def _goes_on(self) -> Iterator[None]:
        """Report a failure within as a condition, and go on."""
        try:
            yield
        except Exception as error:
            logger.exception("a pass failed and the loop goes on", extra=event("pass.failed"))
            self._problem = f"internal error: {error!r}"

    async def reconcile(self) -> None:
        """One pass: read the engine, decide, and hand the acts to the workers."""
        try:
            await self.read_engine()
        except EngineUnavailable as error:
            self._problem = str(error)
            self._workers.follow({})  # the engine's state is unknown: begin nothing
            return
        self._problem = None
        if self._cannot_load is not None:
            self._workers.follow({})
            return
        if not self._volume.read_once:
            return
        self._pin_problem = self._subjects.pin_problem(self.capacity())
        resident = self.resident()
        for entry in resident:  # loaded by an earlier process, or by a call that was given up
            if entry.current and entry.wanted is not None:
                self._residents.records.setdefault(entry.name, entry.wanted)
        self._engine.prefer({entry.name: entry.policy for entry in resident})
        limits = self._limits
        decided = plan.decide(resident, self._subjects.absent(), self._residents.limit, limits.weights)
        self._workers.follow(self._work(decided, len(resident)))
        self.decided = True
        self._on_decided()
        self._look_again()

    def resident(self) -> list[plan.Resident]:
        """The engine's adapters by the last look, for ``plan``."""
        return self._subjects.resident()

    def _work(self, decided: plan.Plan, taken: int) -> dict[Kind, dict[str, Work]]:
        """Return the workers' tasks; ``taken``: the occupied places.

        A load whose place an unload has to free waits for the pass after that unload.
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
            served = self._names.lookup(name)
            if served is None or residents.is_loading(served) or free <= 0:
                continue
            free -= 1
            loads[name] = partial(self._load, served, spare=name in decided.spare)
        return {Kind.UNLOAD: unloads, Kind.LOAD: loads}

    async def _load(self, served: Served, *, spare: bool) -> None:
        await asyncio.shield(self._residents.load(served, spare=spare))

    async def read_engine(self) -> None:
        """Read what the engine holds and uses; raises EngineUnavailable if the first is unknown.

        Asks again for its fixed facts if it may have restarted: it was silent, or lost an adapter. While
        nothing is loaded a restart loses nothing, so each look asks for the version.
        """
        residents, changing = self._residents, self._residents.locks.watched()
        loaded = await self._engine.loaded()
        self._cannot_load = loaded.cannot_load
        residents.note_loaded(loaded, changing)
        restarted, residents.lost = self._problem is not None or residents.lost, False
        if restarted:
            residents.try_again()
        self._to_ask = self._to_ask or restarted
        self._to_ask_version = self._to_ask_version or restarted or not residents.paths
        if self._to_ask_version:
            await self._learn_version()
        activity: Activity | None = None
        problem, ours = None, residents.requested()
        try:
            activity = await self._engine.activity()
        except EngineUnavailable as error:
            problem = f"ActivityUnknown: nothing is unloaded until it is known: {error}"
        self.queue = activity.queue if activity is not None else None
        if not residents.paths:
            activity, problem = Activity(), None
        elif activity is not None:
            self.max_loras = activity.max_loras
            if loaded.tiers:  # the plugin's: a stock engine swaps, and one batch's number bounds nothing
                self.slots = activity.max_loras
        residents.note_activity(activity, ours)
        self._activity_problem = problem
        await self._bound(loaded, activity)
        if loaded != self._engine_view:
            self.foreign, self._engine_view = Foreign.of(loaded, self._stager.owns), loaded
            self._names.of_engine = self.foreign.names

    async def _learn_version(self) -> None:
        version = await self._engine.version()
        self._to_ask_version = False
        if version != self.version and self._engine_view is not None:
            self._residents.effects.clear()
            self._residents.base_scores.clear()
            self._residents.failures = {}  # they tell of what the engine was before
        self.version = version

    async def _bound(self, loaded: Loaded, activity: Activity | None) -> None:
        """Learn how many adapters an engine keeps in memory; others' take places there.

        Asked once the engine answers. It keeps at least as many as one batch may mix (``--max-loras``).
        """
        if self._limits.max_loaded is not None or not self._engine.rereads:
            return
        if self._to_ask:
            with suppress(EngineUnavailable):
                self._keeps, self._to_ask = await self._engine.holds_most(), False
        if self._to_ask:
            return  # keep the last bound: a smaller one would unload adapters
        if self._keeps is None and activity is not None:
            self._keeps = activity.max_loras
        elsewhere = sum(not self._stager.owns(path) for path in loaded.adapters.values())
        self._residents.limit = max(1, self._keeps - elsewhere) if self._keeps is not None else None
