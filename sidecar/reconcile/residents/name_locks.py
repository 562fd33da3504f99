"""One lock for each of the engine's names, and which of them changed while the engine answered.

An engine's answer says nothing of a name that somebody loaded or unloaded meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from weakref import WeakSet, WeakValueDictionary


@dataclass(slots=True, weakref_slot=True, eq=False)
class Changing:
    """Engine's names that changed between a question to the engine and the use of its answer."""

    names: set[str]


class NameLocks:
    """Lives on the event loop. Keeps nothing of a name that nobody locks."""

    def __init__(self) -> None:
        self._changing: WeakSet[Changing] = WeakSet()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # their users hold them

    def of(self, name: str) -> asyncio.Lock:
        """Return the lock of the engine's ``name``."""
        return self._locks.setdefault(name, asyncio.Lock())

    def locked(self) -> set[str]:
        """Return the names that are locked now."""
        return {name for name, lock in self._locks.items() if lock.locked()}

    def watched(self) -> Changing:
        """Return the names that change from now on. The caller keeps it until it used the engine's answer."""
        self._changing.add(changing := Changing(self.locked()))
        return changing

    @asynccontextmanager
    async def change(self, name: str) -> AsyncIterator[None]:
        """Lock the engine's ``name``, and let questions to the engine that are under way know of it."""
        async with self.of(name):
            try:
                yield
            finally:
                for one in self._changing:
                    one.names.add(name)
