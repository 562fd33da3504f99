"""Room for a load: in the stage folder, and in the engine's memory. It unloads adapters that nobody uses.

Lives on the event loop, which knows what is in use; ``plan`` says which adapters give way. If all are in
use for the moment, a request waits for room as it does for a load. A load without a waiting request takes
free room only, unless its adapter is pinned.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace

from lora_fs.sidecar.model import Policy, PolicyKind, Record
from lora_fs.sidecar.reconcile import plan
from lora_fs.sidecar.reconcile.catalog import Served
from lora_fs.sidecar.reconcile.residents.loading import Residents
from lora_fs.sidecar.reconcile.stage.jobs import Stager

LOOK_S = 0.5  # between two looks at an engine that others may use, too
TRY_S = 120.0
PATIENCE_S = 5.0  # with an engine that unloads one; then another goes as well
MOST_HUNG = 2  # an engine that hangs in so many unloads hangs in all: no other goes for nothing
GIVE_WAY_S = 1.0  # a request for a loaded, idle adapter waits this long for those that wait for a place


class Room:
    """The room of one replica: it waits for some, and evicts for it.

    Args:
        read: the engine, of what it holds and what is in use.
        look: what it holds, as it was read.
        default, weights: as of the replica's limits.
    """

    def __init__(
        self,
        residents: Residents,
        stager: Stager,
        read: Callable[[], Awaitable[None]],
        look: Callable[[], list[plan.Resident]],
        default: Policy,
        weights: Mapping[str, int],
    ) -> None:
        self._residents, self._stager, self._read, self._look = residents, stager, read, look
        self._default, self._weights = default, weights
        self._asked: Counter[str] = Counter()  # by the copy's path
        self._requests: dict[object, Served] = {}  # those that count there
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()
        self._wanted = 0  # places that requests wait for
        self._moved = asyncio.Event()  # set once, and replaced, when a place is taken or may become free
        self._unloading: set[asyncio.Future[None]] = set()
        stager.find_room, stager.on_end = self.find, self._freed.set
        residents.find_place, residents.on_free = self.find_place, self._free

    @contextmanager
    def asked(self, served: Served) -> Iterator[None]:
        """Keep ``served`` from giving way inside the block: a request waits for it or uses it.

        Its copy does not under any name. Its place does not under its own: another name of it takes another.
        """
        path, request = self._stager.path(served.record), object()
        self._asked[path] += 1
        self._requests[request] = served
        try:
            yield
        finally:
            del self._requests[request]
            self._asked[path] -= 1
            if not self._asked[path]:
                del self._asked[path]

    async def give_way(self, served: Served) -> None:
        """If ``served`` is loaded and idle, let the requests that wait for a place go first.

        Otherwise an adapter with a steady flow of requests would keep its place for good.
        """
        if not self._wanted:
            return
        path, record, name_of = self._stager.path(served.record), served.record, self._residents.name_of
        if (record.spec.policy or self._default).kind is PolicyKind.PINNED:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(GIVE_WAY_S):
                while self._wanted and not self._asked[path] and name_of(served) is not None:
                    await self._moved.wait()

    async def find(self, record: Record, lacks: int, since: float) -> bool:
        """Evict adapters whose copies have ``lacks`` bytes, or wait for a change; False: there is no hope.

        Raises:
            EngineUnavailable: what the engine uses is unknown.
        """

        async def evict() -> bool:
            return self._stager.free_bytes() >= lacks or await self._evict(record, lacks)

        def hopeless() -> bool:
            return plan.firm_bytes(self._look()) + record.spec.size_bytes > self._stager.max_bytes

        return await self._seek(record, since, evict, hopeless)

    async def find_place(self, record: Record, since: float) -> bool:
        """Evict the adapter whose place a load takes, or wait for a change; False: nobody waits for that.

        Raises:
            EngineUnavailable: what the engine uses is unknown.
        """

        async def evict() -> bool:
            asked = set(map(self._residents.name_of, self._requests.values()))
            resident = [replace(r, in_flight=r.in_flight + (r.name in asked)) for r in self._look()]
            limit = self._residents.limit
            gone = plan.next_to_go(resident, limit, self._weights) if limit is not None else ()
            return any([await self._unload(n, "its place is taken by", record) for n in gone])

        self._wanted += 1
        try:
            return await self._seek(record, since, evict, lambda: False)
        finally:
            self._wanted -= 1
            self._move()

    def _free(self) -> None:
        self._freed.set()
        self._move()

    def _move(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()

    async def _seek(
        self,
        record: Record,
        since: float,
        evict: Callable[[], Awaitable[bool]],
        hopeless: Callable[[], bool],
    ) -> bool:
        """Whether another try is worth it: an adapter was evicted, or changed, meanwhile.

        A request waits until its client leaves. Without one a pinned adapter evicts others for up to
        ``TRY_S``, and never waits.

        Args:
            since: when the load first asked, on the loop's clock.
        """
        policy, path = record.spec.policy or self._default, self._stager.path(record)
        loop = asyncio.get_running_loop()
        async with self._turn:  # two loads do not choose the same ones
            if not self._asked[path] and (
                policy.kind is not PolicyKind.PINNED or loop.time() - since > TRY_S
            ):
                return False
            await self._read()  # after a load or unload whose answer did not come the engine alone knows
            self._freed.clear()
            if await evict():
                return True
            if not self._asked[path] or hopeless():
                return False
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._freed.wait()
            return True

    async def _evict(self, record: Record, lacks: int) -> bool:
        """Unload adapters until their copies give ``lacks`` bytes; whether any went."""
        refused, gone, before = set[str](), 0, self._stager.free_bytes()
        while self._stager.free_bytes() - before < lacks:
            resident = [self._as_asked(one) for one in self._look() if one.name not in refused]
            victims = plan.stale(resident)[:1] or plan.give_way(resident, lacks, self._weights)
            if not victims:
                break
            for name in victims:
                if not await self._unload(name, "its copy makes room for", record):
                    refused.add(name)  # the engine keeps it, or it came into use: others go
                    break
                gone += 1
        return gone > 0

    async def _unload(self, name: str, why: str, record: Record) -> bool:
        """Unload ``name`` for ``record``, and say whether it went.

        An engine that hangs in it holds up nobody for longer than ``PATIENCE_S``. Where it hangs in
        ``MOST_HUNG`` unloads, no other begins until one of them has ended.
        """
        if len(self._unloading) >= MOST_HUNG:
            return False
        reason = f"Evicted: {why} {self._told(name, record)}"
        unloading = asyncio.ensure_future(self._residents.unload(name, reason))
        self._unloading.add(unloading)
        unloading.add_done_callback(self._unloading.discard)
        await asyncio.wait({unloading}, timeout=PATIENCE_S)
        if not unloading.done():
            return False
        unloading.result()
        return name not in self._residents.paths

    def _told(self, name: str, record: Record) -> str:
        """Name the adapter that comes, to those who may read what goes: one of its own namespace alone."""
        gone = self._residents.records.get(name)
        own = gone is not None and gone.namespace == record.namespace
        return record.name if own else "an adapter of another namespace"

    def _as_asked(self, one: plan.Resident) -> plan.Resident:
        asked = one.wanted is not None and one.current and self._asked[self._stager.path(one.wanted)]
        return replace(one, in_flight=one.in_flight + int(asked))
