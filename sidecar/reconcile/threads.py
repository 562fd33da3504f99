"""Threads for calls that may hang, as those on a volume do: a few, however often a caller gives up.

Who gives up is free at once. The thread is not: it counts until its call ends, so that a volume that
hangs costs this many threads and no more. A process that ends waits for none of them.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextvars import copy_context
from functools import partial
from typing import Any, ParamSpec, TypeVar

import anyio

Given = ParamSpec("Given")
Result = TypeVar("Result")


class Daemons(Executor):
    """At most ``most`` threads, which end when there is no work. A process waits for Python's own pools."""

    def __init__(self, most: int, name: str) -> None:
        self._most, self._name = most, name
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._threads = 0

    def submit(
        self, call: Callable[Given, Result], /, *args: Given.args, **options: Given.kwargs
    ) -> Future[Result]:
        """Begin ``call`` as soon as a thread is free. Who cancels it before then has it not begun."""
        future: Future[Result] = Future()
        with self._lock:
            if self._threads < self._most:
                threading.Thread(target=self._work, name=self._name, daemon=True).start()
                self._threads += 1
            self._waiting.append((future, partial(call, *args, **options)))
        return future

    async def run(self, call: Callable[[], Result]) -> Result:
        """Wait for ``call``, with the caller's context. Who is cancelled leaves it to itself."""
        return await asyncio.wrap_future(self.submit(copy_context().run, call))

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._threads -= 1
                    return
                future, call = self._waiting.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)
            del future, call  # nothing is kept alive while the next is waited for


class AllTaken(TimeoutError):
    """No thread was free in time: the call was not begun, and never will be."""


class Threads:
    """``most`` calls at once, those that nobody waits for any more among them."""

    def __init__(self, most: int) -> None:
        self._daemons = Daemons(most, "lora-fs-bounded")

    async def run(self, call: Callable[[], Result], within_s: float) -> Result:
        """Wait for a thread and for ``call`` in it, ``within_s`` in all.

        Raises:
            AllTaken: it was not begun. TimeoutError: it goes on. What ``call`` raises.
        """
        begun = self._daemons.submit(copy_context().run, call)
        try:
            with anyio.fail_after(within_s):
                return await asyncio.wrap_future(begun)
        except TimeoutError as error:
            if begun.cancelled():
                raise AllTaken(f"no thread was free in {within_s:.0f} s") from error
            raise
