"""Uploads at a gateway: an adapter's files pass to one replica as they come, and are kept nowhere.

A replica refuses an upload before it asks for the body, or at any time later: its answer passes back at once,
and the gateway sends the rest to nobody. The replica bounds the size and the time, as at its own port.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Final

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from lora_fs.sidecar.gateway.forward import UPLOAD_TAKE_S, Body, Hop
from lora_fs.sidecar.server.leaving import while_it_waits
from lora_fs.sidecar.server.routes.registered import NAME

PATHS: Final = ("/v1/lora_adapters", f"{NAME}/upload")


class Uploads:
    """The endpoint of ``PATHS``."""

    def __init__(self, hop: Hop, clock: Callable[[], float]) -> None:
        self._hop, self._clock = hop, clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one upload; a client that leaves ends it at the replica at once."""
        arriving = _Arriving(receive)
        await while_it_waits(self._answer(scope, arriving, send), arriving.receive)

    async def _answer(self, scope: Scope, arriving: _Arriving, send: Send) -> None:
        headers = Headers(scope=scope)
        self._hop.check(scope, headers)
        length = headers.get("content-length", "")
        size = int(length) if length.isdecimal() else None
        if size is None and "transfer-encoding" not in headers:
            size = 0
        body = Body(size, arriving.pieces, is_kept=False, take_s=UPLOAD_TAKE_S)
        await self._hop.pass_through(scope, send, body, lambda: None, None, (), self._clock())


class _Arriving:
    """A body as it comes. Nothing is read before a replica asks for it, and then one message waits here."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._is_wanted = asyncio.Event()
        self._messages = asyncio.Queue[Message](1)

    async def receive(self) -> Message:
        """Return the client's next message, which waits here until ``pieces`` takes it."""
        await self._is_wanted.wait()
        message = await self._receive()
        if message["type"] == "http.request":
            await self._messages.put(message)
        return message

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body."""
        self._is_wanted.set()
        more = True
        while more:
            message = await self._messages.get()
            if piece := message.get("body", b""):
                yield piece
            more = message.get("more_body", False)
