"""Send an answer's head with its body: one call of the system, one packet, and one wake-up of the client."""

from __future__ import annotations

import asyncio
from typing import Any, cast

MOST_BYTES = 1 << 16  # that wait: the transport says that it is full once it has them


class JoinedWrites:
    """A transport that sends together what is written in one turn of the loop.

    Each call of the system wakes the client, which on a busy machine costs more than the call.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._pieces: list[bytes] = []
        self._size = 0

    @classmethod
    def around(cls, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> asyncio.Transport:
        """Return ``transport`` with its writes joined."""
        return cast(asyncio.Transport, cls(transport, loop))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Send ``data`` at the end of the loop's turn, or at once if MOST_BYTES wait."""
        if not self._pieces:
            self._loop.call_soon(self._flush)
        self._pieces.append(data)
        self._size += len(data)
        if self._size > MOST_BYTES:
            self._flush()

    def close(self) -> None:
        """Send what waits, and close."""
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        pieces, self._pieces, self._size = self._pieces, [], 0
        if pieces:
            self._transport.write(pieces[0] if len(pieces) == 1 else b"".join(pieces))
