"""One replica, as the routes see it: look-ups from memory, and calls that wait a bounded time.

``names`` knows the volume, ``residents`` the engine. ``reconciler`` reads both and decides by ``plan``;
a ``worker`` per adapter does it. ``status`` and ``telemetry`` say what came of it.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from lora_fs.sidecar.engine.protocol import Engine, Facts
from lora_fs.sidecar.errors import LoraFsError, NotFound, TemporaryError, WaitTimeout
from lora_fs.sidecar.model import AdapterKey, AdapterStatus, Condition, Download, JsonObject
from lora_fs.sidecar.reconcile import status
from lora_fs.sidecar.reconcile.admin.administration import Administration
from lora_fs.sidecar.reconcile.admin.service import Loaded, LoadRequest, Registrations
from lora_fs.sidecar.reconcile.admin.uploads import Upload
from lora_fs.sidecar.reconcile.catalog import Catalog, Served, Terms, public_name
from lora_fs.sidecar.reconcile.names import Names
from lora_fs.sidecar.reconcile.reconciler import Limits, Reconciler
from lora_fs.sidecar.reconcile.residents.eviction import Room
from lora_fs.sidecar.reconcile.residents.loading import Residents
from lora_fs.sidecar.reconcile.residents.probe import Ask, EffectProbe
from lora_fs.sidecar.reconcile.stage.jobs import Stager
from lora_fs.sidecar.reconcile.stage.prefetch import Ahead
from lora_fs.sidecar.reconcile.telemetry.conditions import Readiness, Since
from lora_fs.sidecar.reconcile.telemetry.durations import Durations
from lora_fs.sidecar.reconcile.telemetry.events import EventLog, News
from lora_fs.sidecar.reconcile.telemetry.usage import UsageReport
from lora_fs.sidecar.reconcile.watch.watcher import Volume
from lora_fs.sidecar.registry.lifecycle.ingest import Registered
from lora_fs.sidecar.registry.view.snapshot import Desired, touched

_CHANCE = random.SystemRandom()  # its own: vLLM may seed the process's, on all replicas alike


class Replica:
    """Implements ``server.ports.ReplicaPort``. ``on_pass`` is called after every pass.

    ``ask`` gives the log-probabilities of a prompt's next tokens. None: look for no adapter's effect.
    """

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
        ask: Ask | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.replica_id, self.model, self.namespaces = replica_id, model, namespaces
        self._volume, self._registrations = volume, registrations
        self._stager, self._limits, self._on_pass, self._clock = stager, limits, on_pass, clock
        self._ahead = ahead
        self.events = EventLog()
        self.administration = Administration(registrations, limits.default_policy)
        self.names = Names(Terms(model, namespaces, default_policy=limits.default_policy), volume)
        self._residents = Residents(engine, stager, self.wake, self.engine_failed, self.events, clock)
        self._kept_for: Desired | None = None  # forget every name that it lacks
        self._effect = EffectProbe(ask, self._residents, self.events, self.wake) if ask is not None else None
        self._since = Since()
        self._news = News(self.events)
        self._loop = Reconciler(
            replica_id,
            self.names,
            volume,
            engine,
            stager,
            self._residents,
            limits,
            self._decided,
            self._passed,
            clock,
        )
        read, look, default = self._loop.read_engine, self._loop.resident, limits.default_policy
        self._room = Room(self._residents, stager, read, look, default, limits.weights)

    # -- what the routes ask: from memory ----------------------------------------------------

    def catalog(self) -> Catalog:
        return self.names.catalog()

    def lookup(self, name: str) -> Served | None:
        return self.names.lookup(name)

    def check_read(self) -> None:
        self._volume.check_read()

    def choose(self, served: Served, user: str | None) -> Served:
        chosen = self.catalog().choose(served, user, _CHANCE.random)
        self._residents.usage.asked(chosen.record.key)
        return chosen

    def answered(self, served: Served, status: int) -> None:
        self._residents.usage.answered(served.record.key, status)

    def usage(self) -> UsageReport:
        catalog = self.catalog()
        sides = ((catalog.served[name], trial.served) for name, trial in catalog.trials.items())
        return self._residents.usage.report(one.record.key for pair in sides for one in pair)

    def base_cards(self) -> tuple[JsonObject, ...]:
        return self._loop.foreign.cards

    def passes_through(self, name: str) -> bool:
        return name in self.names.of_engine

    def kept_to(self, name: str) -> str | None:
        desired = self._volume.desired if self._volume.read_once else None
        return self._loop.foreign.kept_to(name, desired, self.model, self.namespaces)

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
        return status.residency(self._residents, self.catalog())

    def downloads(self) -> Mapping[str, Download]:
        return self._registrations.downloads.under_way()

    def end(self) -> None:
        """Let what goes on in threads end soon."""
        self._registrations.downloads.stop()

    def staged(self, served: Served) -> bool:
        return self._stager.has(served.record)

    def capacity(self) -> int | None:
        return self._loop.capacity()

    def facts(self) -> tuple[Facts, str | None, bool | None]:
        """What the engine says of itself, its version, whether it loads adapters; unknown while silent."""
        return self._loop.facts()

    def readiness(self) -> Readiness:
        conditions = (*self._volume.conditions(), *self._loop.conditions())
        return Readiness(self._loop.ready and self._loop.decided, conditions, self._since.began(conditions))

    @property
    def engine_version(self) -> str | None:
        """The engine's version by its last answer; None before the first."""
        return self._loop.version

    def counters(self) -> Mapping[str, float]:
        return dict(self._residents.counters)

    def durations(self) -> Mapping[str, Durations]:
        return {"pass_seconds": self._loop.passes, **self._residents.durations}

    def figures(self) -> Mapping[str, float]:
        known = {"capacity": self.capacity(), "max_loras": self._loop.max_loras}
        if (queue := self._loop.queue) is not None and self._loop.ready:
            known |= {"requests_running": queue.running, "requests_waiting": queue.waiting}
        return status.numbers(self._residents, self._stager, known)

    def tiers(self) -> Mapping[str, int]:
        return status.tiers(self._residents, self._stager)

    # -- what the routes do --------------------------------------------------------------------

    @asynccontextmanager
    async def hold(self, name: str, timeout_s: float) -> AsyncIterator[str]:
        served = self.lookup(name)
        if served is None:
            self.check_read()
            raise NotFound(f"The model `{name[:200]}` does not exist.")
        await self._room.give_way(served)
        with self._room.asked(served):
            async with self._residents.hold(served, timeout_s) as engine_name:
                yield engine_name

    def forget(self, engine_name: str) -> None:
        self._residents.forget(engine_name)
        self.wake()

    async def changed(self) -> None:
        await self._loop.changed()

    async def load_adapter(self, request: LoadRequest, *, writer: str) -> Loaded:
        loaded = await self._registrations.register(request, writer)
        try:
            async with self.hold(request.lora_name, self._limits.hold_timeout_s):
                return loaded
        except TemporaryError as error:
            late = WaitTimeout(f"{request.lora_name} is registered and not loaded here yet: {error}")
            late.wrote = loaded
            raise late from error
        except LoraFsError:
            await self._registrations.undo(loaded, writer)
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
                while self._has_withdrawn(lora_name):
                    await self._loop.changed()
        except TimeoutError as error:
            why = "its last requests are still draining here, or the engine has not unloaded it"
            late = WaitTimeout(f"{lora_name} is withdrawn; {why}")
            late.wrote = lora_name
            raise late from error

    def _has_withdrawn(self, lora_name: str) -> bool:
        """Whether the engine still has what was withdrawn with a name: every revision of a plain one."""
        plain = lora_name.partition("@")[0]
        left = [one for one in self._residents.revisions_of(plain) if self.lookup(one) is None]
        return bool(left) if lora_name == plain else any(one in (plain, lora_name) for one in left)

    def engine_failed(self, problem: str | None) -> None:
        self._loop.engine_failed(problem)

    # -- the loop ------------------------------------------------------------------------------

    def wake(self) -> None:
        """Start a pass soon. Call on the event loop."""
        self._loop.wake()

    async def run(self) -> None:
        """Reconcile until cancelled. Should the loop itself fail, this replica is not ready from then on."""
        await self._loop.run()

    async def probe(self) -> None:
        """Find out, until cancelled, whether loaded adapters change an answer. At once if that is off."""
        if self._effect is not None:
            await self._effect.run()

    async def reconcile(self) -> None:
        """Make one pass; the workers do what it decides."""
        await self._loop.reconcile()

    def _passed(self) -> None:
        if self._ahead is not None and self._volume.read_once:
            self._ahead.look(self.catalog())
        if self._effect is not None:
            self._effect.look()
        self._news.troubles(self.readiness().conditions)
        self._on_pass(self)

    def _decided(self) -> None:
        self._news.written(self._volume.desired)
        self._forget()

    def _forget(self) -> None:
        """Forget names that are no longer served, among those that changed since the last pass."""
        after = self._volume.desired
        before, self._kept_for = self._kept_for or after, after
        moved = touched(before.pointers, after.pointers)
        changed = {public_name(scope, name, self.namespaces) for scope, name in moved}
        written = touched(before.records, after.records)
        for key in written:
            name = public_name(key.scope, key.name, self.namespaces)
            changed |= {name, f"{name}@{key.revision}"}

        def present(key: AdapterKey) -> bool:
            record = after.records.get(key)
            return record is not None and record.present

        self._residents.usage.keep_only(present, written)
        if written:
            self._stager.trusted.keep_only(self.names.digests())
            if self._effect is not None:
                self._effect.keep_only(self.names.digests())
        self._residents.keep_only(lambda name: self.lookup(name) is not None)
        self._since.keep_only(lambda name: self.lookup(name) is not None, changed)
