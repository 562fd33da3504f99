"""Threads for calls that may hang, as those on a volume do: a few, however often a caller gives up.

Who gives up is free at once. The thread is not: it counts until its call ends, so that a volume that
hangs costs this many threads and no more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

import anyio
import anyio.to_thread

Result = TypeVar("Result")


class AllTaken(TimeoutError):
    """No thread was free in time: the call was not begun, and never will be."""


class Threads:
    """``most`` calls at once, those that nobody waits for any more among them."""

    def __init__(self, most: int) -> None:
        self._places = anyio.CapacityLimiter(most)

    async def run(self, call: Callable[[], Result], within_s: float) -> Result:
        """Wait for a thread and for ``call`` in it, ``within_s`` in all.

        Raises:
            AllTaken: it was not begun. TimeoutError: it goes on. What ``call`` raises.
        """
        begun, place = False, object()
        try:
            with anyio.fail_after(within_s):
                await self._places.acquire_on_behalf_of(place)
                begun = True
                # A task of its own: it waits for the thread however long its caller does, but not at the end
                # of the process.
                own = anyio.CapacityLimiter(1)
                in_thread = anyio.to_thread.run_sync(call, abandon_on_cancel=True, limiter=own)
                thread = asyncio.create_task(in_thread)
                thread.add_done_callback(lambda ended: self._ended(ended, place))
                return await asyncio.shield(thread)
        except TimeoutError as error:
            if begun:
                raise
            raise AllTaken(f"no thread was free in {within_s:.0f} s") from error

    def _ended(self, thread: asyncio.Task[Result], place: object) -> None:
        self._places.release_on_behalf_of(place)
        if not thread.cancelled():
            thread.exception()  # seen, where nobody waits for it any more
