"""One replica: the desired state in memory, the engine beside it, and the loop between them.

Owns which names are resident and who holds them. All state lives on the event loop; the disk
is touched in threads only (``volume.py``, ``staging.py``). Level-triggered: a wake-up only
starts a pass, and every pass reads the engine again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from lora_fs.sidecar.engine.protocol import Engine, Loaded
from lora_fs.sidecar.errors import (
    EngineUnavailable,
    LoraFsError,
    NotFound,
    TemporaryError,
    WaitTimeout,
)
from lora_fs.sidecar.model import AdapterStatus, JsonObject, Phase, Policy, PolicyKind, Record
from lora_fs.sidecar.reconcile import backoff, plan
from lora_fs.sidecar.reconcile.backoff import Failure
from lora_fs.sidecar.reconcile.catalog import Catalog, Served, build, find
from lora_fs.sidecar.reconcile.staging import Stager
from lora_fs.sidecar.reconcile.volume import Volume

logger = logging.getLogger(__name__)

ENGINE_RETRY_S = 0.5


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """vLLM's ``POST /v1/load_lora_adapter``."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False


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
    """Implements ``server.ports.ReplicaPort``."""

    def __init__(
        self,
        replica_id: str,
        model: str,
        namespaces: tuple[str, ...],
        volume: Volume,
        engine: Engine,
        stager: Stager,
        limits: Limits,
    ) -> None:
        self.replica_id, self.model, self.namespaces = replica_id, model, namespaces
        self._volume, self._engine, self._stager, self._limits = volume, engine, stager, limits
        self._catalog = Catalog()
        self._built_from: tuple[int, tuple[str, ...]] | None = None
        self._engine_view: Loaded | None = None
        self._engine_problem: str | None = "the engine has not answered yet"
        self._resident: dict[str, str] = {}  # engine name → staged path
        self._holds: Counter[str] = Counter()  # engine name → requests in flight
        self._used_at: dict[str, float] = {}
        self._failures: dict[str, Failure] = {}
        self._phases: dict[str, Phase] = {}
        self._loads: dict[tuple[str, str], asyncio.Task[str]] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._counters: Counter[str] = Counter()
        self._wake = asyncio.Event()
        self._preloaded = False

    # -- what the routes ask: from memory ----------------------------------------------------

    def catalog(self) -> Catalog:
        desired, bases = self._volume.desired, self._base_names()
        if self._built_from != (desired.version, bases):
            version = self._catalog.version + 1
            self._catalog = build(desired, self.namespaces, bases, version)
            self._built_from = (desired.version, bases)
        return self._catalog

    def lookup(self, name: str) -> Served | None:
        return find(self.catalog(), self._volume.desired, self.model, self.namespaces, name)

    def base_cards(self) -> tuple[JsonObject, ...]:
        if self._engine_view is None:
            return ()
        foreign = [
            card
            for name, card in self._engine_view.cards.items()
            if not self._stager.owns(self._engine_view.adapters[name])
        ]
        return tuple(dict(card) for card in (*self._engine_view.base_cards, *foreign))

    def passes_through(self, name: str) -> bool:
        return any(card.get("id") == name for card in self.base_cards())

    def _base_names(self) -> tuple[str, ...]:
        cards = self._engine_view.base_cards if self._engine_view is not None else ()
        return tuple(sorted(str(card["id"]) for card in cards))

    def statuses(self) -> Mapping[str, AdapterStatus]:
        now = time.monotonic()
        found = {name: self._status(served, now) for name, served in self.catalog().served.items()}
        for name, record in self.catalog().conflicts.items():
            found[name] = _status(
                record,
                Phase.FAILED,
                "NameConflict",
                f"the engine serves its base model as {name!r}: register it under another name",
            )
        return found

    def _status(self, served: Served, now: float) -> AdapterStatus:
        record, name = served.record, served.name
        failure = self._failures.get(name)
        if self._resident_name(served) is not None:
            return _status(record, Phase.READY, "Loaded")
        if name in self._phases:
            return _status(record, self._phases[name])
        if failure is not None and failure.digest == record.spec.digest:
            return _status(
                record,
                Phase.FAILED,
                type(failure.error).__name__,
                str(failure.error),
                failure.attempts,
                max(0.0, round(failure.retry_at - now, 1)),
            )
        if self._policy(record).kind in plan.ALWAYS:
            return _status(record, Phase.PENDING, "NotLoadedYet")
        return _status(record, Phase.EVICTED, "LoadsAtFirstRequest")

    def residency(self) -> Mapping[str, JsonObject]:
        now = time.monotonic()
        return {
            name: {
                "in_flight": self._holds[name],
                "idle_s": round(now - self._used_at.get(name, now), 1),
                "path": path,
            }
            for name, path in self._resident.items()
        }

    def capacity(self) -> int | None:
        return self._limits.max_loaded

    def readiness(self) -> Readiness:
        conditions = list(self._volume.conditions())
        if self._engine_problem is not None:
            conditions.append(f"EngineUnavailable: {self._engine_problem}")
        return Readiness(self._engine_problem is None and self._volume.read_once, tuple(conditions))

    def counters(self) -> Mapping[str, float]:
        return dict(self._counters)

    # -- holding and loading -------------------------------------------------------------------

    @asynccontextmanager
    async def hold(self, name: str, timeout_s: float) -> AsyncIterator[str]:
        served = self.lookup(name)
        if served is None:
            raise NotFound(f"The model `{name[:200]}` does not exist.")
        engine_name = self._resident_name(served) or await self._ensure(served, timeout_s)
        self._holds[engine_name] += 1
        try:
            yield engine_name
        finally:
            self._holds[engine_name] -= 1
            if self._holds[engine_name] <= 0:
                del self._holds[engine_name]
                if self._resident_name(served) != engine_name or self.lookup(name) is None:
                    self.wake()
            self._used_at[engine_name] = time.monotonic()

    def forget(self, engine_name: str) -> None:
        self._resident.pop(engine_name, None)
        self.wake()

    def _resident_name(self, served: Served) -> str | None:
        path = self._stager.path(served.record)
        for name in (served.name, self._side_name(served)):
            if self._resident.get(name) == path:
                return name
        return None

    def _side_name(self, served: Served) -> str:
        """The engine's name for a revision whose plain name is still busy with another."""
        name, at, _ = served.name.rpartition("@")
        return f"{name if at else served.name}@{served.record.revision}"

    async def _ensure(self, served: Served, timeout_s: float) -> str:
        deadline = time.monotonic() + timeout_s
        failure = self._failures.get(served.name)
        same = failure is not None and failure.digest == served.record.spec.digest
        if failure is not None and same and time.monotonic() < failure.retry_at:
            raise failure.error
        while True:
            task = self._load_task(served)
            try:
                name = await asyncio.wait_for(asyncio.shield(task), deadline - time.monotonic())
            except TimeoutError as error:
                raise WaitTimeout(f"{served.name} is still loading after {timeout_s:.0f} s") from error
            if self._resident_name(served) == name:
                return name
            if time.monotonic() >= deadline:
                raise WaitTimeout(f"{served.name} was unloaded while it was waited for")

    def _load_task(self, served: Served) -> asyncio.Task[str]:
        key = (served.name, served.record.spec.digest)
        task = self._loads.get(key)
        if task is None:
            task = self._loads[key] = asyncio.create_task(self._load(served))
            task.add_done_callback(lambda done: self._load_done(key, done))
        return task

    def _load_done(self, key: tuple[str, str], task: asyncio.Task[str]) -> None:
        self._loads.pop(key, None)
        if not task.cancelled() and task.exception() is not None:
            logger.warning("%s is not loaded: %s", key[0], task.exception())
        self._volume.publish(self)

    async def _load(self, served: Served) -> str:
        async with self._lock(served.name):
            try:
                self._phases[served.name] = Phase.VALIDATING
                path = await self._stager.stage(served.record)
                self._phases[served.name] = Phase.LOADING
                name = await self._place(served, path)
            except LoraFsError as error:
                self._counters["load_failures_total"] += 1
                self._failures[served.name] = backoff.after(
                    self._failures.get(served.name), served.record.spec.digest, error, time.monotonic()
                )
                raise
            finally:
                self._phases.pop(served.name, None)
            self._failures.pop(served.name, None)
            self._counters["loads_total"] += 1
            self._used_at[name] = time.monotonic()
            return name

    async def _place(self, served: Served, path: str) -> str:
        """Load ``path`` under the plain name, or beside it while requests hold the old bytes."""
        name, old = served.name, self._resident.get(served.name)
        if old == path:
            return name
        if old is not None and self._holds[name]:
            name, old = self._side_name(served), None
        if old is not None:
            await self._unload(name)
        try:
            await self._engine.load(name, path)
        except LoraFsError:
            if old is not None:
                await self._engine.load(name, old)  # the revision it served goes on serving
                self._resident[name] = old
            raise
        self._resident[name] = path
        return name

    async def _unload(self, name: str) -> None:
        path = self._resident.pop(name)
        try:
            await self._engine.unload(name)
        except LoraFsError:
            self._resident.setdefault(name, path)
            raise
        self._counters["unloads_total"] += 1

    def _lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name.partition("@")[0], asyncio.Lock())

    def _policy(self, record: Record) -> Policy:
        return record.spec.policy or self._limits.default_policy

    # -- registering through this replica -------------------------------------------------------

    async def load_adapter(self, request: LoadRequest, *, writer: str) -> Record:
        record, undo = await self._volume.register(request, writer)
        name = request.lora_name
        served = self.lookup(name)
        if served is None:
            raise WaitTimeout(f"{name} is registered and not visible here yet: try again")
        try:
            async with self.hold(name, self._limits.hold_timeout_s):
                return record
        except TemporaryError:
            raise
        except LoraFsError:
            await self._volume.run(undo)
            raise

    async def unload_adapter(self, lora_name: str, *, writer: str) -> None:
        served = self.lookup(lora_name)
        if served is None:
            raise NotFound(f"The lora adapter '{lora_name[:200]}' cannot be found.")
        await self._volume.unregister(served, writer)
        deadline = time.monotonic() + self._limits.hold_timeout_s
        self.wake()
        while lora_name in self._resident:
            if time.monotonic() > deadline:
                raise WaitTimeout(f"{lora_name} is withdrawn; its last requests are still draining here")
            await self.reconcile()
            if lora_name in self._resident:
                await asyncio.sleep(0.05)

    # -- the loop ------------------------------------------------------------------------------

    def wake(self) -> None:
        """Start a pass soon. Call on the event loop."""
        self._wake.set()

    async def run(self) -> None:
        """Reconcile until cancelled."""
        while True:
            self._wake.clear()
            await self.reconcile()
            self._volume.publish(self)
            await asyncio.to_thread(self._stager.sweep, set(self._resident.values()))
            try:
                pause_s = self._limits.resync_s if self._engine_problem is None else ENGINE_RETRY_S
                await asyncio.wait_for(self._wake.wait(), pause_s)
            except TimeoutError:
                continue

    async def reconcile(self) -> None:
        """One pass: read the engine, decide, act. Loads run on their own; a failure is kept."""
        await self._read_engine()
        if self._engine_problem is not None or not self._volume.read_once:
            return
        decided = plan.decide(self._residents(), self._absents(), self._limits.max_loaded)
        for name, reason in decided.unload.items():
            lock = self._lock(name)
            if lock.locked() or self._holds[name]:
                continue
            async with lock:
                logger.info("unloading %s: %s", name, reason)
                try:
                    if name in self._resident:
                        await self._unload(name)
                except LoraFsError as error:
                    logger.warning("%s stays loaded: %s", name, error)
        for name in decided.load:
            served = self.lookup(name)
            if served is not None:
                self._load_task(served)
        self._forget()

    async def _read_engine(self) -> None:
        busy = {name.partition("@")[0] for name, lock in self._locks.items() if lock.locked()}
        try:
            loaded = await self._engine.loaded()
        except EngineUnavailable as error:
            self._engine_problem = str(error)
            return
        busy |= {name.partition("@")[0] for name, lock in self._locks.items() if lock.locked()}
        self._engine_view, self._engine_problem = loaded, None
        known = {n: p for n, p in self._resident.items() if n.partition("@")[0] in busy}
        for name, path in loaded.adapters.items():
            if self._stager.owns(path) and name.partition("@")[0] not in busy:
                known[name] = path
        self._resident = known

    def _residents(self) -> list[plan.Resident]:
        now = time.monotonic()
        entries = []
        for name, path in self._resident.items():
            served = self.lookup(name)
            entries.append(
                plan.Resident(
                    name,
                    served.record if served is not None else None,
                    served is not None and self._stager.path(served.record) == path,
                    self._holds[name],
                    now - self._used_at.setdefault(name, now),
                    self._policy(served.record) if served is not None else self._limits.default_policy,
                )
            )
        return entries

    def _absents(self) -> list[plan.Absent]:
        served = self.catalog().served.values()
        limit = self._limits.max_loaded
        everything = not self._preloaded and limit is not None and len(served) <= limit
        self._preloaded = True
        now = time.monotonic()
        entries = []
        for entry in served:
            policy = self._policy(entry.record)
            if not everything and policy.kind not in plan.ALWAYS:
                continue
            if self._resident_name(entry) is not None:
                continue
            if everything:
                policy = policy.model_copy(update={"kind": PolicyKind.EAGER})
            failure = self._failures.get(entry.name)
            waits = (
                failure is not None and failure.digest == entry.record.spec.digest and now < failure.retry_at
            )
            entries.append(plan.Absent(entry.name, entry.record, policy, not waits))
        return entries

    def _forget(self) -> None:
        """Keep no state for names that are neither served nor loaded."""
        for name in [n for n in self._failures if self.lookup(n) is None]:
            del self._failures[name]
        for name in [n for n in self._used_at if n not in self._resident]:
            del self._used_at[name]
        for name, lock in list(self._locks.items()):
            if not lock.locked() and name not in self._resident and self.lookup(name) is None:
                del self._locks[name]


def _status(
    record: Record,
    phase: Phase,
    reason: str = "",
    message: str = "",
    attempts: int = 0,
    retry_in_s: float | None = None,
) -> AdapterStatus:
    return AdapterStatus(
        key=tuple(record.key),
        generation=record.generation,
        phase=phase,
        reason=reason,
        message=message,
        attempts=attempts,
        retry_in_s=retry_in_s,
    )
