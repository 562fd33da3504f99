"""Bodies of requests: read whole, each bounded, all together bounded, and in time.

Small ones have a room of their own, whatever large ones are there. What a body takes is given back as soon
as nobody needs it any more, which is long before a stream's end. Who sends slowly keeps nobody out: where
there is no room the slowest incomplete body gives way, and one caller's have half a room at most.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from lora_fs.sidecar.errors import InputError, TemporaryError, TooLarge
from lora_fs.sidecar.server.middleware.access import address_of

SMALL_BYTES = 1 << 20
SMALL_ROOM_BYTES = 128 << 20  # that all small ones have together
IDLE_S = 30.0  # in which nothing of a body comes
LEAST_BYTES_S = 1 << 16  # from when IDLE_S are over
SLOW_S = 1.0  # an incomplete body older than this gives way where there is no room
PAUSE_S = 0.1  # and so does one of which nothing came for this long
_HELD = "lora_fs.body"  # its key in a scope
_GAVE_WAY = "the body came slowly, and gave way to others: ask again"


class Held:
    """A body in memory, until ``release``."""

    def __init__(self, intake: Intake, caller: str | None = None) -> None:
        self._intake, self.caller = intake, caller
        self.body = bytearray()
        self.begun = self.fed_at = asyncio.get_running_loop().time()
        self._wait: asyncio.Timeout | None = None
        self._has_given_way = False

    async def read(self, receive: Receive) -> None:
        """Take what comes. Raises as ``Intake.read``."""
        more, idle_s = True, self._intake.idle_s
        clock = asyncio.get_running_loop().time
        begun = self.begun
        while more:
            left_s = begun + idle_s + len(self.body) / LEAST_BYTES_S - clock()
            try:
                async with asyncio.timeout(min(idle_s, left_s)) as self._wait:
                    message = await receive()
            except TimeoutError as error:
                if self._has_given_way:
                    raise TemporaryError(_GAVE_WAY) from error
                raise InputError(
                    f"nothing more of the body came for {idle_s:g} s"
                    if left_s > idle_s
                    else f"the body comes too slowly: {len(self.body)} bytes in {clock() - begun:.0f} s"
                ) from error
            if self._has_given_way:
                raise TemporaryError(_GAVE_WAY)
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            self._intake.admit(self, len(message.get("body", b"")))
            self.body += message.get("body", b"")
            self.fed_at = clock()
            more = message.get("more_body", False)

    def give_way(self) -> None:
        """Let others have the room. Called while ``read`` waits, which ends in a TemporaryError."""
        assert self._wait is not None
        self._has_given_way = True
        self._wait.reschedule(asyncio.get_running_loop().time())
        self.release()

    @property
    def is_large(self) -> bool:
        """Whether it takes of the large ones' room."""
        return len(self.body) > SMALL_BYTES

    def is_slow(self, now: float) -> bool:
        """Whether it may have to give way while it is incomplete."""
        return now - self.begun > SLOW_S or now - self.fed_at > PAUSE_S

    def bytes_per_s(self, now: float) -> float:
        """How fast it came so far."""
        return len(self.body) / max(now - self.begun, 1e-3)

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
        self._incomplete: set[Held] = set()

    @asynccontextmanager
    async def read(
        self, headers: Mapping[str, str], receive: Receive, caller: str | None = None
    ) -> AsyncIterator[Held]:
        """The whole body, held while the context is open at most.

        Args:
            caller: whose incomplete bodies have half a room at most; None: nobody's.
        Raises:
            ClientDisconnect: nobody waits for an answer.
            TooLarge: it is over what one may have.
            TemporaryError: there is no room beside the others.
            InputError: it does not go on.
        """
        told = headers.get("content-length", "")
        if told.isdecimal() and len(told) < 20:
            self._check(int(told))
        held = Held(self, caller)
        self._incomplete.add(held)
        try:
            await held.read(receive)
            self._incomplete.discard(held)
            yield held
        finally:
            self._incomplete.discard(held)
            held.release()

    def admit(self, held: Held, more: int) -> None:
        """Let a body that is being read grow. Raises as ``read``."""
        size, grown = len(held.body), len(held.body) + more
        self._check(grown)
        self._take(size, -1)
        try:
            self._make_room(held, grown)
        except TemporaryError:
            self._take(size)
            raise
        self._take(grown)

    def _make_room(self, held: Held, size: int) -> None:
        """Let slow bodies give way until this one has room: its caller's own, then anybody's."""
        large = _rooms(size)[1] > 0
        room = 2 * self.most_bytes if large else SMALL_ROOM_BYTES
        others = [one for one in self._incomplete if one is not held and one.is_large == large and one.body]
        own = [one for one in others if held.caller is not None and one.caller == held.caller]
        while own and size + sum(len(one.body) for one in own) > room // 2:
            self._give_way(own, large)
        while size + (self._large_bytes if large else self._small_bytes) > room:
            self._give_way(others, large)

    def _give_way(self, among: list[Held], large: bool) -> None:
        now = asyncio.get_running_loop().time()
        slow = [one for one in among if one.body and one.is_slow(now)]
        if not slow:
            raise TemporaryError(f"too many {'large ' if large else ''}requests are under way: ask again")
        slowest = min(slow, key=lambda one: one.bytes_per_s(now))
        slowest.give_way()
        among.remove(slowest)

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


class WholeBody:
    """Read the body before the application runs, which finds it by ``held_body``.

    Raises:
        TooLarge, TemporaryError, InputError: as ``Intake.read``.
    """

    def __init__(self, app: ASGIApp, intake: Intake) -> None:
        self._app, self._intake = app, intake

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientDisconnect):
            async with self._intake.read(Headers(scope=scope), receive, address_of(scope)) as held:
                await self._app({**scope, _HELD: held}, receive, send)


def held_body(scope: Scope) -> Held:
    """Return what ``WholeBody`` read."""
    held = scope[_HELD]
    assert isinstance(held, Held)
    return held


def _rooms(size: int) -> tuple[int, int]:
    """What a body takes of the small ones' room, and of the large ones'."""
    return (size, 0) if size <= SMALL_BYTES else (0, size)
