"""A request that waits when the server ends gets an error at once.

A uvicorn that ends waits for its connections, and vLLM sets it no bound: a request that waits for an
adapter would keep the process up for as long as it waits. Answers that have begun continue.
If vLLM's own end fails (0.32 may look at a process that has just ended), it cancels the loop while
requests wait. They get the same error.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lora_fs.sidecar.errors import EngineUnavailable

LOOK_S = 0.2
TOLD = "this server ends: ask another one"


class Ending:
    """The end of one server."""

    def __init__(self) -> None:
        self._begun = False
        self._waits: set[asyncio.Timeout] = set()
        self._ends: Callable[[], bool] = lambda: False

    def begin(self) -> None:
        """End what waits, and what comes to wait from now on."""
        self._begun = True
        for wait in self._waits:
            wait.reschedule(asyncio.get_running_loop().time())
        self._waits.clear()

    @asynccontextmanager
    async def waiting(self, *, late: bool = False) -> AsyncIterator[Callable[[], None]]:
        """End the context when the server ends. It yields a function: once called, the context stays.

        Args:
            late: also keep a context entered after the end began, and one that is cancelled.

        Raises:
            EngineUnavailable: the server ends.
        """
        if self._begun and not late:
            raise EngineUnavailable(TOLD)
        try:
            async with asyncio.timeout(None) as wait:
                self._waits.add(wait)
                try:
                    yield lambda: self._waits.discard(wait)
                except asyncio.CancelledError as error:
                    if not late and wait in self._waits and self._ends():
                        raise EngineUnavailable(TOLD) from error
                    raise
                finally:
                    self._waits.discard(wait)
        except TimeoutError as error:
            if wait.expired():
                raise EngineUnavailable(TOLD) from error
            raise

    def bounds(self, app: ASGIApp) -> ASGIApp:
        """``app``, of which the server's end waits for no answer that has not begun."""

        async def bounded(scope: Scope, receive: Receive, send: Send) -> None:
            async with self.waiting() as answers:

                async def answer(message: Message) -> None:
                    answers()
                    await send(message)

                await app(scope, receive, answer)

        return bounded

    @asynccontextmanager
    async def watched(self, ends: Callable[[], bool], begin: Callable[[], None]) -> AsyncIterator[None]:
        """Call ``begin`` as soon as ``ends`` is true, inside the block."""
        self._ends = ends

        async def watch() -> None:
            while not ends():  # noqa: ASYNC110 - nothing of vLLM's tells
                await asyncio.sleep(LOOK_S)
            begin()

        watching = asyncio.create_task(watch(), name="lora-fs end")
        try:
            yield
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
