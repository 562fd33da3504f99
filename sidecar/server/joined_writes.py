"""Send an answer's head with its body: one call of the system, one packet, and one wake-up of the client."""

from __future__ import annotations

import asyncio
from typing import Any, cast


class JoinedWrites:
    """A transport that keeps an answer's head until the next write, or until the loop's next turn.

    Each system call wakes the client, which on a busy machine costs more than the call. Later writes go out
    at once: another turn of the loop costs each event of a stream as much as the write.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._keeps_next = False
        self._kept = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def as_transport(self) -> asyncio.Transport:
        """Return this as what it stands for."""
        return cast(asyncio.Transport, self)

    def keep_next(self) -> None:
        """Keep the next write: it is a head."""
        self._keeps_next = True

    def write(self, data: bytes) -> None:
        """Send ``data`` after the kept head, or keep it."""
        if self._keeps_next:
            self._keeps_next = False
            self._kept += data
            self._loop.call_soon(self._flush)
        elif self._kept:
            self._kept += data
            self._flush()
        else:
            self._transport.write(data)

    def close(self) -> None:
        """Send the kept head, and close."""
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        kept, self._kept = self._kept, b""
        if kept and not self._transport.is_closing():  # else the client left meanwhile
            self._transport.write(kept)
