"""A request as it comes in: where it goes, its body, read once and given again, and whether its client waits.

A body has a bound. The application behind gets every byte that the client sends, and learns when it leaves.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import Message, Receive, Scope

from lora_fs.sidecar.errors import TooLarge


class ClientLeft(Exception):
    """The client left: nobody waits for the answer."""


def route_of(scope: Scope) -> str:
    """The path that routes compare: without the prefix of ``--root-path``."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path.removeprefix(root) if path.startswith(f"{root}/") else path


class Incoming:
    """``receive`` gives the application what ``read`` took, and then what comes."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._taken: Message | None = None
        self._next: asyncio.Task[Message] | None = None
        self._wait: asyncio.Timeout | None = None

    async def read(self, most: int) -> bytes:
        """The whole body, or what came of it before the client left.

        Raises:
            TooLarge: it has more than ``most`` bytes.
        """
        chunks, size = [], 0
        while self._taken is None:
            message = await self._receive()
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            if size > most:
                raise TooLarge(f"the body is over {most} bytes")
            if message["type"] != "http.request":
                self._taken = message  # the client left
            elif not message.get("more_body"):
                self._taken = {"type": "http.request", "body": b"".join(chunks), "more_body": False}
        return b"".join(chunks)

    async def receive(self) -> Message:
        """Receive a message, as an ASGI application does."""
        if self._taken is not None:
            message, self._taken = self._taken, None
            return message
        if self._next is None:
            return await self._receive()
        upcoming, self._next = self._next, None
        return await upcoming

    @asynccontextmanager
    async def while_it_waits(self) -> AsyncIterator[None]:
        """End the block's waits if the client leaves meanwhile. Call after ``read``.

        Raises:
            ClientLeft: it did.
        """
        if self._next is None:
            self._next = asyncio.ensure_future(self._receive())
        self._next.add_done_callback(self._came)
        try:
            async with asyncio.timeout(None) as self._wait:
                try:
                    yield
                finally:
                    wait, self._wait = self._wait, None
        except TimeoutError as error:
            if wait.expired():
                raise ClientLeft from error
            raise

    def _came(self, upcoming: asyncio.Task[Message]) -> None:
        came = None if upcoming.cancelled() or upcoming.exception() is not None else upcoming.result()
        if came is not None and came["type"] == "http.disconnect" and self._wait is not None:
            self._wait.reschedule(asyncio.get_running_loop().time())

    def close(self) -> None:
        """Listen no more."""
        if self._next is not None:
            self._next.cancel()
