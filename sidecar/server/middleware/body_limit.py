"""Bodies of requests: read whole, each bounded, all together bounded, and in time.

Small ones have a room of their own, whatever large ones are there. What a body takes is given back as soon
as nobody needs it any more, which is long before a stream's end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from lora_fs.sidecar.errors import InputError, TemporaryError, TooLarge

SMALL_BYTES = 1 << 20
SMALL_ROOM_BYTES = 128 << 20  # that all small ones have together
IDLE_S = 30.0  # in which nothing of a body comes
LEAST_BYTES_S = 1 << 16  # from when IDLE_S are over


class Held:
    """A body in memory, until ``release``."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake
        self.body = bytearray()

    async def read(self, receive: Receive) -> None:
        """Take what comes. Raises as ``Intake.read``."""
        more, idle_s = True, self._intake.idle_s
        clock = asyncio.get_running_loop().time
        begun = clock()
        while more:
            left_s = begun + idle_s + len(self.body) / LEAST_BYTES_S - clock()
            try:
                async with asyncio.timeout(min(idle_s, left_s)):
                    message = await receive()
            except TimeoutError as error:
                raise InputError(
                    f"nothing more of the body came for {idle_s:g} s"
                    if left_s > idle_s
                    else f"the body comes too slowly: {len(self.body)} bytes in {clock() - begun:.0f} s"
                ) from error
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            self._intake.admit(len(self.body), len(message.get("body", b"")))
            self.body += message.get("body", b"")
            more = message.get("more_body", False)

    def release(self) -> None:
        """Nobody needs it any more."""
        self._intake.give_back(len(self.body))
        self.body = bytearray()


class Intake:
    """Of one server.

    Args:
        most_bytes: of one body; all that are held have twice as much at most.
    """

    def __init__(self, most_bytes: int, *, idle_s: float = IDLE_S) -> None:
        self.most_bytes, self.idle_s = most_bytes, idle_s
        self._large_bytes = self._small_bytes = 0

    @asynccontextmanager
    async def read(self, headers: Mapping[str, str], receive: Receive) -> AsyncIterator[Held]:
        """The whole body, held while the context is open at most.

        Raises:
            ClientDisconnect: nobody waits for an answer.
            TooLarge: it is over what one may have.
            TemporaryError: there is no room beside the others.
            InputError: it does not go on.
        """
        told = headers.get("content-length", "")
        if told.isdecimal() and len(told) < 20:
            self._check(int(told))
        held = Held(self)
        try:
            await held.read(receive)
            yield held
        finally:
            held.release()

    def admit(self, size: int, more: int) -> None:
        """Let a body of ``size`` bytes grow. Raises as ``read``."""
        self._check(size + more)
        self.give_back(size)
        small, large = _rooms(size + more)
        full = large and self._large_bytes + large > 2 * self.most_bytes
        if full or (small and self._small_bytes + small > SMALL_ROOM_BYTES):
            self._take(size)
            raise TemporaryError(f"too many {'large ' if full else ''}requests are under way: ask again")
        self._take(size + more)

    def give_back(self, size: int) -> None:
        """A body of ``size`` bytes is gone."""
        self._take(size, -1)

    def _take(self, size: int, sign: int = 1) -> None:
        small, large = _rooms(size)
        self._small_bytes += sign * small
        self._large_bytes += sign * large

    def _check(self, size: int) -> None:
        if size > self.most_bytes:
            raise TooLarge(f"the body is over {self.most_bytes} bytes (LORA_FS_BODY_MAX_BYTES)")


def _rooms(size: int) -> tuple[int, int]:
    """What a body takes of the small ones' room, and of the large ones'."""
    return (size, 0) if size <= SMALL_BYTES else (0, size)
