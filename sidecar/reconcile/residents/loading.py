"""Loads and unloads: one load for any number of waiters, and none of a name while it is in use.

The engine's loads and unloads of one name never overlap. Staging comes before that, so that a load that waits
for room locks no name that could make room. An adapter that fails keeps its backoff.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from lora_fs.sidecar import tracing
from lora_fs.sidecar.engine.protocol import Engine
from lora_fs.sidecar.errors import (
    EngineGone,
    EngineRejected,
    InvalidAdapter,
    LoraFsError,
    NameTaken,
    NoSpareRoom,
    RegistryLost,
    TemporaryError,
    WaitTimeout,
)
from lora_fs.sidecar.logs import event
from lora_fs.sidecar.model import Phase, Record, engine_name, public_of
from lora_fs.sidecar.reconcile.catalog import Served
from lora_fs.sidecar.reconcile.residents import backoff
from lora_fs.sidecar.reconcile.residents.engine_state import EngineState
from lora_fs.sidecar.reconcile.residents.foreign import copy_of
from lora_fs.sidecar.reconcile.stage.jobs import Stager
from lora_fs.sidecar.reconcile.telemetry.events import EventLog
from lora_fs.sidecar.validate import heeds_all, needs_newer, too_old

logger = logging.getLogger(__name__)

LOGGED_S = 30.0  # each request may try again: the same failure of one adapter is one line in so long
_MAY_BE_OVER = (TemporaryError, RegistryLost)  # whoever asks next has it tried at once


class Residents(EngineState):
    """The adapters in the engine.

    Args:
        on_change: a load or unload ended, or a draining name came free.
        on_gone: a load found no engine, and why.

    Attributes:
        find_place: makes one more place in the engine for a record; False if nobody may wait for one.
    """

    def __init__(
        self,
        engine: Engine,
        stager: Stager,
        on_change: Callable[[], None],
        on_gone: Callable[[str], None],
        events: EventLog,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(engine, stager, events, clock)
        self._on_change, self._on_gone = on_change, on_gone
        self.find_place: Callable[[Record, float], Awaitable[bool]] = _no_place
        self._taken = 0  # places of loads under way
        self._no_place: dict[tuple[str, str], WaitTimeout] = {}  # by load: it waits for a place
        self._places = asyncio.Lock()  # whose turn it is to take one: first come, first served

    @asynccontextmanager
    async def hold(self, served: Served, timeout_s: float) -> AsyncIterator[str]:
        """Keep ``served`` loaded while the context is open; yields the engine's name for it.

        Raises:
            InvalidAdapter, EngineRejected: a load failed, and its delay is not over.
            TemporaryError: no load ended in time.
        """
        began, found = self._clock(), self.name_of(served)
        if found is not None and self.may_reread(found) and self.may_be_dropped(found):
            renewing = asyncio.ensure_future(self.unload(found, "the engine may have dropped it"))
            await asyncio.wait({renewing}, timeout=timeout_s)
            found = self.name_of(served)
        self.counters["request_misses_total" if found is None else "request_hits_total"] += 1
        left_s = timeout_s - (self._clock() - began)
        name = await self._ensure(served, left_s) if found is None else found
        self._holds[name] += 1
        try:
            if found is not None and self.may_reread(name):
                await self._make_whole(served, left_s)
            asked = self._clock()
            yield name
            if name in self.paths:
                self._memory.used(name, asked)
        finally:
            self._used_at[name] = self._clock()
            self._let_go(name)

    @contextmanager
    def lent(self, name: str) -> Iterator[bool]:
        """Keep the engine's ``name`` loaded for a request that is no use of it; yields False if it is not."""
        if name not in self.paths or self.locks.of(name).locked():
            yield False
            return
        self._holds[name] += 1
        try:
            yield True
        finally:
            self._let_go(name)

    def _let_go(self, name: str) -> None:
        self._holds[name] -= 1
        if self._holds[name] <= 0:
            del self._holds[name]
            self.on_free()
            if name in self.draining:
                self._on_change()

    async def _make_whole(self, served: Served, timeout_s: float) -> None:
        """Verify the copy that the engine may read again. Makes a damaged one anew."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._stager.stage(served.record)
        except TimeoutError as error:
            raise WaitTimeout(f"{served.name} is still staged anew after {timeout_s:.0f} s") from error

    async def _ensure(self, served: Served, timeout_s: float) -> str:
        failure = self.failures.get(served.name)
        if failure is not None and self.waits(served) and not isinstance(failure.error, _MAY_BE_OVER):
            raise backoff.afresh(failure.error)
        deadline = self._clock() + timeout_s
        while True:
            try:
                async with asyncio.timeout(deadline - self._clock()):
                    name = await asyncio.shield(self.load(served))
            except TimeoutError as error:
                no_place = self._no_place.get((served.name, served.record.spec.digest))
                full = no_place or self._stager.waiting.get(self._stager.path(served.record))
                if full is not None:
                    raise backoff.afresh(full) from error
                raise WaitTimeout(f"{served.name} is still loading after {timeout_s:.0f} s") from error
            except NoSpareRoom:  # it joined a load that began without a request
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
        if task is None or task.done():  # joining a finished load would block later loads for ever
            load = self._load(served, spare)
            task = self._loads[key] = asyncio.create_task(load, name=f"load {served.name}")
            task.add_done_callback(lambda done: self._load_done(key, done))
        return task

    def _load_done(self, key: tuple[str, str], task: asyncio.Task[str]) -> None:
        if self._loads.get(key) is task:
            del self._loads[key]
        if not task.cancelled() and task.exception() is not None:
            error, now = task.exception(), self._clock()
            text, logged_at = self._logged.get(key[0], (None, now))
            if text != str(error) or now - logged_at >= LOGGED_S:
                self._logged[key[0]] = str(error), now
                told = event("load.failed", adapter=key[0], digest=key[1], error=type(error).__name__)
                logger.warning("%s is not loaded: %s", key[0], str(error), extra=told)
            if isinstance(error, EngineGone):
                self._on_gone(str(error))
        self._on_change()

    async def _load(self, served: Served, spare: bool) -> str:
        record, load = served.record, (served.name, served.record.spec.digest)
        key, failure, name = record.key, self.failures.get(served.name), ""
        again = failure is not None and failure.concerns(record)
        try:
            self.phases[served.name] = Phase.VALIDATING
            self._under_load[load] = record
            self._note_load(self._stager.path(record))
            with self._measured("stage", record):
                staging = self._stager.stage(record)
                self._events.tell("Retrying" if again else "Loading", key=key)
                path = await staging
            await self._check_engine(record)
            waited = await self._take_place(served, spare)
            try:
                if waited:  # long enough, perhaps, that the copy got damaged
                    await self._stager.stage(record)
                try:
                    name = await self._place(served, path, spare)
                except EngineRejected:
                    if not await self._stager.mend(record):
                        raise
                    name = await self._place(served, path, spare)
            finally:
                self._taken -= 1
        except LoraFsError as error:
            if not isinstance(error, EngineGone):  # that says nothing of the adapter
                previous = self.failures.get(served.name)
                self.failures[served.name] = backoff.after(previous, record, error, self._clock())
            if not isinstance(error, NoSpareRoom):
                self.counters["load_failures_total"] += 1
                self._events.tell("Failed", f"{type(error).__name__}: {error}", key, warning=True)
            raise
        finally:
            self.phases.pop(served.name, None)
            del self._under_load[load]
            if self.paths.get(name) != self._stager.path(record):  # else it stays in use
                self._note_use()
        self.failures.pop(served.name, None)
        self._logged.pop(served.name, None)
        self.counters["loads_total"] += 1
        self._events.tell("Loaded", f"as {public_of(name)}", key)
        self._used_at[name] = self._clock()
        told = event("load.done", adapter=served.name, revision=record.revision, engine_name=name)
        logger.info("%s is loaded", served.name, extra=told)
        return name

    async def _check_engine(self, record: Record) -> None:
        """Refuse an adapter that the engine's current version serves wrong: it may be a new engine."""
        if self._engine.is_own and heeds_all(await self._engine.version()):
            return  # whatever the copy's config sets: it is not read once more
        fields = needs_newer(await self._stager.config(record))
        findings = too_old(fields, await self._engine.version()) if fields else ()
        if findings:
            raise InvalidAdapter(str(record.key), findings)

    async def _take_place(self, served: Served, spare: bool) -> bool:
        """Wait for a free place: the engine would read an adapter beyond its places again in a step.

        Returns:
            Whether it had to wait.
        """
        since, waited = asyncio.get_running_loop().time(), self._places.locked()
        if waited and spare:
            raise NoSpareRoom(f"no place for {served.name}: others wait for one")
        load = (served.name, served.record.spec.digest)  # two names may have one copy
        self._no_place[load] = WaitTimeout(
            f"no place for {served.name}: {self.limit} adapters are loaded and in use; raise "
            "--max-loaded, up to the engine's --max-cpu-loras"
        )
        try:
            async with self._places:
                while self._is_full() and self.name_of(served) is None:
                    waited = True
                    if not await self.find_place(served.record, since):
                        raise NoSpareRoom(f"no place for {served.name}: {self.limit} adapters are loaded")
                self._taken += 1
        finally:
            del self._no_place[load]
        return waited

    def why_not_loaded(self) -> str:
        """Say why an adapter is not loaded that no request wants yet, and what to do if that lasts."""
        if self._is_full():
            return f"all {self.limit} places are taken, and it evicts no other: raise --max-loaded"
        return "its load is about to begin; if this lasts, look at the engine's state"

    def _is_full(self) -> bool:
        return self.limit is not None and self._count() + self._taken >= self.limit

    async def _place(self, served: Served, path: str, spare: bool) -> str:
        """Load ``path`` under the name of its bytes, beside others that the public name had."""
        record = served.record
        name = self.name_of(served) or engine_name(served.name, record.spec.digest)
        async with self.locks.change(name):
            self.phases[served.name] = Phase.LOADING
            if self.name_of(served) != name:
                try:
                    await self._load_as(name, path, record, spare)
                except NameTaken as error:
                    if copy_of(name, error.path or "") != record.spec.digest:
                        raise
                    self.elsewhere[name] = record.spec.digest
        return name

    async def _load_as(self, name: str, path: str, record: Record, spare: bool) -> None:
        asked = self._clock()
        try:
            with self._measured("load", record):
                await self._engine.load(name, path, record, spare=spare)
        except (EngineRejected, NoSpareRoom):
            self._memory.passed(self._clock())  # one that fails late has taken a place
            raise
        except BaseException:  # it may have it all the same: the next answer that comes says
            self._doubtful[name] = path
            self._memory.passed(self._clock())
            raise
        self.usage.loaded(record.key, self._clock() - asked)
        self.paths[name], self.records[name] = path, record
        self._stays.pop(name, None)  # it was of an engine that lost it since
        self._memory.loaded(name, asked)

    async def unload(self, name: str, reason: str, *, drained: bool = False) -> None:
        """Unload the engine's ``name`` unless it is in use or changing. Logs and remembers a failure.

        Args:
            drained: it was to go before, and its requests have ended now.
        """
        if self.locks.of(name).locked() or self.in_flight(name) or name not in self.paths:
            return
        async with self.locks.change(name):
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
        except BaseException:  # a cancelled call does not know whether the engine unloaded it
            self.paths.setdefault(name, path)
            raise
        finally:
            del self._under_unload[name]
            self._note_use()
        self._memory.unloaded(name, self._clock() - self.idle_s(name))
        self.counters["unloads_total"] += 1
        self.failures = {n: f for n, f in self.failures.items() if not isinstance(f.error, NoSpareRoom)}

    @contextmanager
    def _measured(self, what: str, record: Record | None) -> Iterator[None]:
        adapter = str(record.key) if record is not None else "unknown"
        with tracing.span(what, lora_fs__adapter=adapter), self.durations[f"{what}_seconds"].measured():
            yield


async def _no_place(record: Record, since: float) -> bool:
    return False
