"""Threads for calls that may hang, as those on a volume do: a few, however often a caller gives up.

Who gives up is free at once. The thread is not: it counts until its call ends, so that a volume that
hangs costs this many threads and no more. One that is idle stays for a while, so that a call that a request
waits for seldom starts one. A process that ends waits for none of them.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextvars import copy_context
from functools import partial
from typing import Any, ParamSpec, TypeVar

import anyio

Given = ParamSpec("Given")
Result = TypeVar("Result")

KEPT_S = 60.0


class Daemons(Executor):
    """At most ``most`` threads; each ends when it had no work for ``kept_s``.

    Python's own pools are no such: a process waits for theirs.
    """

    def __init__(self, most: int, name: str, kept_s: float = KEPT_S) -> None:
        self._most, self._name, self._kept_s = most, name, kept_s
        self._changed = threading.Condition()
        self._waiting: OrderedDict[Future[Any], Callable[[], Any]] = OrderedDict()
        self._threads = self._idle = 0

    def submit(
        self, call: Callable[Given, Result], /, *args: Given.args, **options: Given.kwargs
    ) -> Future[Result]:
        """Begin ``call`` as soon as a thread is free. Who cancels it before then has it not begun."""
        future: Future[Result] = Future()
        future.add_done_callback(self._forget)
        with self._changed:
            # A notified thread that has not woken is still idle, and its call still waits.
            if len(self._waiting) >= self._idle and self._threads < self._most:
                threading.Thread(target=self._work, name=self._name, daemon=True).start()
                self._threads += 1
            self._waiting[future] = partial(call, *args, **options)
            self._changed.notify()
        return future

    async def run(self, call: Callable[[], Result]) -> Result:
        """Wait for ``call``, with the caller's context. A cancelled caller leaves it running."""
        return await asyncio.wrap_future(self.submit(copy_context().run, call))

    def _forget(self, ended: Future[Any]) -> None:
        """Keep nothing of a caller that gave up, also while all threads hang."""
        with self._changed:
            self._waiting.pop(ended, None)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._idle += 1
                has_work = self._changed.wait_for(lambda: bool(self._waiting), self._kept_s)
                self._idle -= 1
                if not has_work:
                    self._threads -= 1
                    return
                future, call = self._waiting.popitem(last=False)
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)
            del future, call  # keeps nothing alive during the wait for the next


class AllTaken(TimeoutError):
    """No thread was free in time: the call was not begun, and never will be."""


class Threads:
    """``most`` calls at once, those that nobody waits for any more among them."""

    def __init__(self, most: int) -> None:
        self._daemons = Daemons(most, "lora-fs-bounded")

    async def run(
        self, call: Callable[[], Result], within_s: float, unbegun: Callable[[], object] | None = None
    ) -> Result:
        """Wait for a thread and for ``call`` in it, ``within_s`` in all.

        Args:
            unbegun: what is done if it will never begin, whyever nobody waits for it; it must not block.
        Raises:
            AllTaken: it was not begun. TimeoutError: it goes on. What ``call`` raises.
        """
        begun = self._daemons.submit(copy_context().run, call)
        if unbegun is not None:
            begun.add_done_callback(lambda done: unbegun() if done.cancelled() else None)
        try:
            with anyio.fail_after(within_s):
                return await asyncio.wrap_future(begun)
        except TimeoutError as error:
            if begun.cancelled():
                raise AllTaken(f"no thread was free in {within_s:.0f} s") from error
            raise
