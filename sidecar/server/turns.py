"""Share a turn of the loop among connections: however many send at once, none waits long."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

MOST = 16  # calls in one turn of the loop: about 1 ms for pieces of bodies


class Turns:
    """The queue of one server: first come, first served, and MOST calls in one turn of the loop."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()

    def add(self, loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
        """Make ``call`` in a later turn of ``loop``."""
        if not self._waiting:
            loop.call_soon(self._run, loop)
        self._waiting.append(call)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        for _ in range(min(MOST, len(self._waiting))):
            loop.call_soon(self._waiting.popleft())
        if self._waiting:
            loop.call_soon(self._run, loop)
