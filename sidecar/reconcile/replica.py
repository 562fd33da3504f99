"""One replica: the desired state in memory, the engine beside it, and the loop between them.

All state lives on the event loop; the disk is touched in threads only (``volume``, ``staging``,
``registrations``). Level-triggered: a wake-up only starts a pass, and every pass reads the
engine again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio.to_thread

from lora_fs.sidecar.engine.protocol import Engine, Loaded
from lora_fs.sidecar.errors import EngineUnavailable, LoraFsError, NotFound, TemporaryError, WaitTimeout
from lora_fs.sidecar.model import AdapterStatus, JsonObject, Policy, PolicyKind, Record
from lora_fs.sidecar.reconcile import plan, status
from lora_fs.sidecar.reconcile.ahead import Ahead
from lora_fs.sidecar.reconcile.catalog import Catalog, Served, build, find, is_withdrawn
from lora_fs.sidecar.reconcile.registrations import LoadRequest, Registrations
from lora_fs.sidecar.reconcile.residents import Residents
from lora_fs.sidecar.reconcile.staging import Stager
from lora_fs.sidecar.reconcile.volume import Volume

logger = logging.getLogger(__name__)

ENGINE_RETRY_S = 0.5
GATHER_S = 0.15  # a burst of changes is one pass, after the list was told; no request waits for a pass
UNASKED_LOADS = 4  # at once, so that a boot with many eager adapters leaves room for requests


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether this replica can serve, and why not."""

    ready: bool
    conditions: tuple[str, ...]  # e.g. "EngineUnavailable: connection refused"


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds and defaults, from the settings."""

    default_policy: Policy
    max_loaded: int | None
    resync_s: float
    hold_timeout_s: float


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
        self._residents = Residents(engine, stager, self.wake, clock)
        self._catalog = Catalog()
        self._built_from: tuple[int, frozenset[str]] | None = None
        self._engine_view: Loaded | None = None
        self._engine_cards: tuple[JsonObject, ...] = ()
        self._engine_names: frozenset[str] = frozenset()
        self._engine_problem: str | None = "the engine has not answered yet"
        self._max_loras: int | None = None
        self._digests_of: object = None
        self._known_digests: frozenset[str] = frozenset()
        self._to_preload: frozenset[str] | None = None  # at boot, if everything fits

    # -- what the routes ask: from memory ----------------------------------------------------

    def catalog(self) -> Catalog:
        desired = self._volume.desired
        key = (desired.version, self._engine_names)
        if self._built_from != key:
            version = self._catalog.version + 1
            self._catalog = build(
                desired, self.namespaces, self._engine_names, version, self._limits.default_policy
            )
            self._built_from = key
        return self._catalog

    def lookup(self, name: str) -> Served | None:
        return find(self.catalog(), self._volume.desired, self.model, self.namespaces, name)

    def base_cards(self) -> tuple[JsonObject, ...]:
        return self._engine_cards

    def passes_through(self, name: str) -> bool:
        return name in self._engine_names

    def statuses(self) -> Mapping[str, AdapterStatus]:
        return status.statuses(self.catalog(), self._residents, self._clock())

    def notable(self) -> tuple[Mapping[str, AdapterStatus], Mapping[str, int]]:
        """The statuses worth telling, and how many adapters are in each phase."""
        told = status.notable(self.catalog(), self._residents, self._clock())
        return told, status.counts(self.catalog(), told)

    def residency(self) -> Mapping[str, JsonObject]:
        found = {}
        for engine_name, held in self._residents.residency().items():
            plain = engine_name.partition("@")[0]
            active = self.catalog().served.get(plain)
            serves_plain = active is not None and self._residents.name_of(active) == engine_name
            found[plain if serves_plain else engine_name] = {**held, "engine_name": engine_name}
        return found

    def staged(self, served: Served) -> bool:
        return self._stager.has(served.record)

    def capacity(self) -> int | None:
        return self._limits.max_loaded or self._max_loras

    def readiness(self) -> Readiness:
        conditions = list(self._volume.conditions())
        if self._engine_problem is not None:
            conditions.append(f"EngineUnavailable: {self._engine_problem}")
        return Readiness(self._engine_problem is None and self._volume.read_once, tuple(conditions))

    def counters(self) -> Mapping[str, float]:
        return dict(self._residents.counters)

    # -- what the routes do --------------------------------------------------------------------

    @asynccontextmanager
    async def hold(self, name: str, timeout_s: float) -> AsyncIterator[str]:
        served = self.lookup(name)
        if served is None:
            raise NotFound(f"The model `{name[:200]}` does not exist.")
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

    async def unload_adapter(self, lora_name: str, *, writer: str) -> None:
        served = self.lookup(lora_name)
        if served is None:
            raise NotFound(f"The lora adapter '{lora_name[:200]}' cannot be found.")
        await self._registrations.unregister(served, writer)
        deadline = self._clock() + self._limits.hold_timeout_s
        while lora_name in self._residents.paths and self.lookup(lora_name) is None:
            if self._clock() > deadline:
                raise WaitTimeout(f"{lora_name} is withdrawn; its last requests are still draining here")
            await self.reconcile()
            if lora_name in self._residents.paths:
                await asyncio.sleep(0.05)

    # -- the loop ------------------------------------------------------------------------------

    def wake(self) -> None:
        """Start a pass soon. Call on the event loop."""
        self._wake.set()

    async def run(self) -> None:
        """Reconcile until cancelled; a pass that fails is told, and the next one comes."""
        while True:
            self._wake.clear()
            try:
                await self.reconcile()
                if self._engine_problem is None:
                    in_use, registered = self._residents.copies_in_use(), self._digests()
                    await anyio.to_thread.run_sync(self._stager.sweep, in_use, registered)
            except Exception as error:
                logger.exception("a pass failed and the loop goes on")
                self._engine_problem = f"internal error: {error!r}"
            if self._ahead is not None and self._volume.read_once:
                self._ahead.look(self.catalog())
            self._on_pass(self)
            pause_s = self._limits.resync_s if self._engine_problem is None else ENGINE_RETRY_S
            with anyio.move_on_after(pause_s):
                await self._wake.wait()
                await asyncio.sleep(GATHER_S)

    async def reconcile(self) -> None:
        """One pass: read the engine, decide, act. Loads run on their own; a failure is kept."""
        try:
            await self._read_engine()
        except EngineUnavailable as error:
            self._engine_problem = str(error)
            return
        self._engine_problem = None
        if not self._volume.read_once:
            return
        decided = plan.decide(self._resident(), self._absent(), self._limits.max_loaded)
        self._residents.draining = frozenset(decided.draining)
        for name, reason in decided.unload.items():
            await self._residents.unload(name, reason)
        for name in decided.load[: max(0, UNASKED_LOADS - self._residents.loading)]:
            served = self.lookup(name)
            if served is not None:
                self._residents.load(served)
        self._residents.keep_only(lambda name: self.lookup(name) is not None)

    async def _read_engine(self) -> None:
        changing = self._residents.changing()
        loaded = await self._engine.loaded()
        self._residents.note_loaded(loaded, changing)
        if self._residents.paths:
            activity = await self._engine.activity()
            self._residents.note_activity(activity)
            self._max_loras = activity.max_loras
        if loaded != self._engine_view:
            ours = self._stager.owns
            foreign = [card for name, card in loaded.cards.items() if not ours(loaded.adapters[name])]
            self._engine_cards = tuple(dict(card) for card in (*loaded.base_cards, *foreign))
            self._engine_names = frozenset(str(card["id"]) for card in self._engine_cards)
            self._engine_view = loaded

    def _digests(self) -> frozenset[str]:
        """Of every adapter there is in these scopes, as last read; made anew only when they change."""
        desired = self._volume.desired
        if self._digests_of is not desired:
            present = (record for record in desired.records.values() if record.present)
            self._known_digests = frozenset(record.spec.digest for record in present)
            self._digests_of = desired
        return self._known_digests

    def _resident(self) -> list[plan.Resident]:
        entries = []
        for name, path in self._residents.paths.items():
            served = self.lookup(name)
            if served is None and not is_withdrawn(self._volume.desired, self.model, self.namespaces, name):
                continue  # nothing is known of it, as while its record cannot be read: it stays
            entries.append(
                plan.Resident(
                    name,
                    served.record if served is not None else None,
                    served is not None and self._stager.path(served.record) == path,
                    self._residents.in_flight(name),
                    self._residents.idle_s(name),
                    self._policy_here(name, served),
                )
            )
        return entries

    def _policy_here(self, name: str, served: Served | None) -> Policy:
        """A copy that the plain name does not serve is lazy, whatever the adapter's policy."""
        if served is None:
            return self._limits.default_policy
        policy = self._policy(served.record)
        active = self.catalog().served.get(name.partition("@")[0])
        if active is None or active.record is not served.record:
            return policy.model_copy(update={"kind": PolicyKind.LAZY})
        return policy

    def _absent(self) -> list[plan.Absent]:
        catalog, limit = self.catalog(), self._limits.max_loaded
        if self._to_preload is None:
            fits = limit is not None and len(catalog.served) <= limit
            self._to_preload = frozenset(catalog.served) if fits else frozenset()
        self._to_preload -= {name.partition("@")[0] for name in self._residents.paths}
        policies = {name: Policy(kind=PolicyKind.EAGER) for name in self._to_preload}
        policies |= {served.name: self._policy(served.record) for served in catalog.unasked}
        wanted = [catalog.served[name] for name in policies if name in catalog.served]
        missing = [served for served in wanted if self._residents.name_of(served) is None]
        return [plan.Absent(s.name, policies[s.name], not self._residents.waits(s)) for s in missing]

    def _policy(self, record: Record) -> Policy:
        return record.spec.policy or self._limits.default_policy
