"""Requests that wait at the proxy: all of them, or those for one adapter. What is under way goes on."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Container
from contextlib import asynccontextmanager
from typing import Final

from lora_fs.sidecar.errors import WaitTimeout

Key = tuple[str, str]  # namespace and name
ALL: Final[Key] = ("", "")
BASE: Final[Key] = ("", "base")  # requests that name no adapter


class Pauses:
    """The paused adapters, and how many requests are under way."""

    def __init__(self) -> None:
        self._ends: dict[Key, asyncio.Event] = {}
        self._under_way: Counter[Key] = Counter()
        self._ended = asyncio.Event()

    def named(self, namespaces: Container[str], own: Key = ALL) -> list[str]:
        """List ``namespace/name`` of each paused adapter; ``*``: all requests wait.

        Args:
            namespaces: whose adapters to list. own: listed as well, whatever its namespace.
        """
        shown = (key for key in sorted(self._ends) if key in (ALL, own) or key[0] in namespaces)
        return ["*" if key == ALL else "/".join(key) for key in shown]

    def pause(self, key: Key) -> None:
        """Let new requests for ``key`` wait; a second pause changes nothing."""
        self._ends.setdefault(key, asyncio.Event())

    def resume(self, key: Key) -> bool:
        """End the pause of ``key``; return whether there was one. ``ALL`` ends every pause."""
        keys = [*self._ends] if key == ALL else [key]
        ends = [self._ends.pop(one) for one in keys if one in self._ends]
        for one in ends:
            one.set()
        return bool(ends)

    @asynccontextmanager
    async def passing(self, key: Key, timeout_s: float) -> AsyncIterator[None]:
        """Wait while ``key`` is paused, then count a request as under way inside the block.

        Raises:
            WaitTimeout: the pause lasted longer than ``timeout_s``.
        """
        if self._ends:
            await self._passed(key, timeout_s)
        self._under_way[key] += 1
        try:
            yield
        finally:
            self._under_way[key] -= 1
            if not self._under_way[key]:
                del self._under_way[key]
                self._ended.set()

    async def quiet(self, key: Key) -> None:
        """Wait until no request for ``key`` is under way."""
        while self._under_way if key == ALL else key in self._under_way:
            self._ended.clear()
            await self._ended.wait()

    async def _passed(self, key: Key, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                while (end := self._ends.get(ALL) or self._ends.get(key)) is not None:
                    await end.wait()
        except TimeoutError as error:
            what = "this replica" if ALL in self._ends else "the adapter"
            raise WaitTimeout(
                f"{what} is paused, and was not resumed in {timeout_s:g} s: ask again, or POST /resume"
            ) from error
