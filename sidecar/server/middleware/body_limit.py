"""Bodies of requests: read whole, each bounded, all together bounded, and in time.

Small bodies have a room of their own, whatever large ones are there. A body's room is free as soon as nobody
needs the body any more, which is long before a stream's end. Slow senders keep nobody out: if there is no
room, the slowest incomplete body gives way, and one caller's have half a room at most.
A body costs the same beside many others: the search for the slowest runs only without room. No client is
blamed for time in which this server itself did not read.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
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
TICK_S = PAUSE_S / 5
_HELD = "lora_fs.body"  # its key in a scope
UNREAD = "lora_fs.unread"  # the extension by which a server says how many bytes of a client wait here
_GAVE_WAY = "the body came slowly, and gave way to others: ask again"


class Held:
    """A body in memory, until ``release``.

    Args:
        caller: whose incomplete bodies have half a room at most.
        told: its length by the head; None: unknown.
        unread: how many of its bytes came and wait for the application: who sent all of it is not slow.
    """

    def __init__(self, intake: Intake, caller: str, told: int | None, unread: Callable[[], int]) -> None:
        self._intake, self.caller, self._told, self._unread = intake, caller, told, unread
        self.body = bytearray()
        self.counted = 0  # bytes, as the intake has them
        self.begun = self.fed_at = intake.time()
        self._wait: asyncio.Timeout | None = None
        self._has_given_way = False

    async def read(self, receive: Receive) -> None:
        """Take what comes. Raises as ``Intake.read``."""
        more, idle_s = True, self._intake.idle_s
        clock = asyncio.get_running_loop().time
        begun = clock()
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
            self.fed_at = self._intake.time()
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
        return self.counted > SMALL_BYTES

    def is_slow(self, now: float) -> bool:
        """Whether it may have to give way while it is incomplete. ``now``: the intake's time."""
        if self._told is not None and len(self.body) + self._unread() >= self._told:
            return False  # its client sent all of it
        return now - self.begun > SLOW_S or now - self.fed_at > PAUSE_S

    def bytes_per_s(self, now: float) -> float:
        """How fast it came so far."""
        return len(self.body) / max(now - self.begun, 1e-3)

    def release(self) -> None:
        """Free the body's room: nobody needs the body any more."""
        self._intake.count(self, 0)
        self.body = bytearray()


class _ReadingTime:
    """Seconds in which the loop read. A stall of the loop counts as two ticks at most.

    What a client sent meanwhile lies in the kernel, and is read in the next turns.
    """

    def __init__(self) -> None:
        self._passed = 0.0
        self._ticked_at = 0.0
        self._tick: asyncio.TimerHandle | None = None

    def run(self, needed: Callable[[], bool]) -> None:
        """Tick for as long as it is ``needed``."""
        loop = asyncio.get_running_loop()

        def tick() -> None:
            self._passed, self._ticked_at = self.now(), loop.time()
            self._tick = loop.call_later(TICK_S, tick) if needed() else None

        if self._tick is None:
            self._ticked_at = loop.time()
            self._tick = loop.call_later(TICK_S, tick)

    def now(self) -> float:
        """Return the seconds so far; they stand still while nobody needs them."""
        if self._tick is None:
            return self._passed
        return self._passed + min(asyncio.get_running_loop().time() - self._ticked_at, 2 * TICK_S)


class Intake:
    """The bodies that one server holds, and their limits.

    Args:
        most_bytes: of one body; all that are held have twice as much at most.
    """

    def __init__(self, most_bytes: int, *, idle_s: float = IDLE_S) -> None:
        self.most_bytes, self.idle_s = most_bytes, idle_s
        self._room = {False: SMALL_ROOM_BYTES, True: 2 * most_bytes}  # by whether a body is large
        self._held: Counter[bool] = Counter()  # bytes, likewise
        self._coming: Counter[tuple[str, bool]] = Counter()  # bytes of callers' incomplete bodies
        self._incomplete: set[Held] = set()
        self._time = _ReadingTime()
        self.time = self._time.now

    @asynccontextmanager
    async def read(self, scope: Scope, receive: Receive) -> AsyncIterator[Held]:
        """The whole body of a request, held no longer than the block runs.

        Raises:
            ClientDisconnect: nobody waits for an answer.
            TooLarge: it is over what one may have.
            TemporaryError: there is no room beside the others.
            InputError: it does not go on.
        """
        said = Headers(scope=scope).get("content-length", "")
        told = int(said) if said.isdecimal() and len(said) < 20 else None
        if told is not None:
            self._check(told)
        unread = scope.get("extensions", {}).get(UNREAD, {}).get("bytes", lambda: 0)
        held = Held(self, address_of(scope), told, unread)
        self._incomplete.add(held)
        self._time.run(lambda: bool(self._incomplete))
        try:
            await held.read(receive)
            self._complete(held)
            yield held
        finally:
            held.release()
            self._incomplete.discard(held)

    def admit(self, held: Held, more: int) -> None:
        """Let a body that is being read grow. Raises as ``read``."""
        grown = len(held.body) + more
        self._check(grown)
        before = held.counted
        self.count(held, grown)
        try:
            self._make_room(held)
        except TemporaryError:
            self.count(held, before)
            raise

    def count(self, held: Held, size: int) -> None:
        """Count a body as ``size`` bytes from now on."""
        for counted, sign in ((held.counted, -1), (size, 1)):
            is_large = counted > SMALL_BYTES
            self._held[is_large] += sign * counted
            if held in self._incomplete:
                self._add(held.caller, is_large, sign * counted)
        held.counted = size

    def _add(self, caller: str, is_large: bool, size: int) -> None:
        self._coming[caller, is_large] += size
        if not self._coming[caller, is_large]:
            del self._coming[caller, is_large]

    def _complete(self, held: Held) -> None:
        self._incomplete.remove(held)
        self._add(held.caller, held.is_large, -held.counted)

    def _make_room(self, held: Held) -> None:
        """Let slow bodies give way until this one has room: its caller's own, then anybody's."""
        is_large, caller = held.is_large, held.caller
        room = self._room[is_large]
        while held.counted < self._coming[caller, is_large] > room // 2:
            self._give_way(held, caller)
        while self._held[is_large] > room:
            self._give_way(held, None)

    def _give_way(self, held: Held, caller: str | None) -> None:
        """Let the slowest body of ``held``'s room give way.

        Args:
            caller: whose body it must be; None: anybody's.
        Raises:
            TemporaryError: none is slow.
        """
        now = self.time()
        slow = [
            one
            for one in self._incomplete
            if one is not held
            and one.counted
            and one.is_large == held.is_large
            and caller in (None, one.caller)
            and one.is_slow(now)
        ]
        if not slow:
            raise TemporaryError(
                f"too many {'large ' if held.is_large else ''}requests are under way: ask again"
            )
        min(slow, key=lambda one: one.bytes_per_s(now)).give_way()

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
            async with self._intake.read(scope, receive) as held:
                await self._app({**scope, _HELD: held}, receive, send)


def held_body(scope: Scope) -> Held:
    """Return what ``WholeBody`` read."""
    held = scope[_HELD]
    assert isinstance(held, Held)
    return held
