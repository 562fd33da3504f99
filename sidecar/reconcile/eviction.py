"""Room in the stage folder for a load that finds it full: what nobody uses is unloaded, and its copy goes.

Lives on the event loop, where it is known what is in use; which adapters give way says ``plan``. A load that
nobody waits for takes what is free, as where places are short, unless its adapter is pinned.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from lora_fs.sidecar.model import Policy, PolicyKind, Record
from lora_fs.sidecar.reconcile import plan
from lora_fs.sidecar.reconcile.engine_state import Residents
from lora_fs.sidecar.reconcile.stage.jobs import Stager


class Room:
    """Of one replica.

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
        self._turn = asyncio.Lock()

    @contextmanager
    def asked(self, record: Record) -> Iterator[None]:
        """A request waits for ``record`` or uses it while the context is open: it does not give way."""
        path = self._stager.path(record)
        self._asked[path] += 1
        try:
            yield
        finally:
            self._asked[path] -= 1
            if not self._asked[path]:
                del self._asked[path]

    async def find(self, record: Record, lacks: int) -> bool:
        """Have so many bytes given up for a copy of ``record``; False if they are not to be had.

        Raises:
            EngineUnavailable: what is in use is unknown.
        """
        policy = record.spec.policy or self._default
        if policy.kind is not PolicyKind.PINNED and not self._asked[self._stager.path(record)]:
            return False
        async with self._turn:  # two loads do not choose the same ones
            await self._read()  # after a load or unload whose answer did not come the engine alone knows
            free = self._stager.release(self._residents.copies_in_use())
            if free >= lacks:
                return True
            paths, refused, gone = self._residents.paths, set[str](), set[str]()
            while free < lacks:
                resident = [self._as_asked(one) for one in self._look() if one.name not in refused]
                victims = plan.stale(resident)[:1] or plan.give_way(resident, lacks - free, self._weights)
                if not victims:
                    break
                for name in victims:
                    path = paths[name]
                    await self._residents.unload(name, f"Evicted: its copy makes room for {record.name}")
                    if name in self._residents.paths:
                        refused.add(name)  # the engine keeps it, or it came into use: another one goes
                        break
                    gone.add(path)
                free = self._stager.release(self._residents.copies_in_use(), gone)
            return free > 0

    def _as_asked(self, one: plan.Resident) -> plan.Resident:
        asked = one.wanted is not None and one.current and self._asked[self._stager.path(one.wanted)]
        return replace(one, in_flight=one.in_flight + int(asked))
