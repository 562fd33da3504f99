"""Bodies on their way in."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from itertools import count

import pytest
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope

from lora_fs.sidecar.errors import InputError, LoraFsError, TemporaryError, TooLarge
from lora_fs.sidecar.server.middleware.body_limit import PAUSE_S, SMALL_BYTES, UNREAD, Intake

pytestmark = pytest.mark.anyio
LARGE = 2 * SMALL_BYTES
CALLERS = count()


def request(told: str | None = None, unread: int = 0) -> Scope:
    """The head of a request, of a caller who sends no other one."""
    headers = [] if told is None else [(b"content-length", told.encode())]
    extensions = {UNREAD: {"bytes": lambda: unread}}
    return {"headers": headers, "client": (f"caller {next(CALLERS)}", 1), "extensions": extensions}


def sending(*chunks: bytes) -> Receive:
    """A client that sends these, and then nothing for ever."""

    async def messages() -> AsyncIterator[Message]:
        for number, chunk in enumerate(chunks, 1):
            more = number < len(chunks) or not chunk
            yield {"type": "http.request", "body": chunk, "more_body": more}
        await asyncio.Event().wait()

    return messages().__anext__


async def read(intake: Intake, receive: Receive, told: str | None = None, unread: int = 0) -> bytes:
    """What a body is when it is let go at once."""
    async with intake.read(request(told, unread), receive) as held:
        return bytes(held.body)


async def test_a_body_in_pieces() -> None:
    """It is whole; one that is as large as it may be is taken."""
    assert await read(Intake(8), sending(b"abc", b"", b"defgh")) == b"abcdefgh"


async def test_one_that_is_too_large() -> None:
    """By what is told of it before any came, or by what came."""
    with pytest.raises(TooLarge, match="LORA_FS_BODY_MAX_BYTES"):
        await read(Intake(8), sending(b""), "9")
    with pytest.raises(TooLarge):
        await read(Intake(8), sending(b"abcd", b"efghi"), "1")


async def test_all_together() -> None:
    """Two of the largest and no third; small ones beside them; room is there again once one is let go."""
    intake = Intake(LARGE)
    async with AsyncExitStack() as stack:
        first, second = [
            await stack.enter_async_context(intake.read(request(), sending(b"x" * LARGE))) for _ in range(2)
        ]
        with pytest.raises(TemporaryError, match="ask again"):
            await read(intake, sending(b"x" * LARGE))
        assert len(await read(intake, sending(b"x" * SMALL_BYTES))) == SMALL_BYTES
        first.release()
        assert first.body == b""
        assert len(await read(intake, sending(b"x" * LARGE))) == LARGE
        second.release()
    for _ in range(3):
        assert len(await read(intake, sending(b"x" * SMALL_BYTES, b"x" * SMALL_BYTES))) == LARGE
    async with intake.read(request(), sending(b"x" * LARGE)), intake.read(request(), sending(b"x" * LARGE)):
        pass


@pytest.mark.parametrize(
    ("end", "error"), [(b"", InputError), (b"x" * LARGE, TooLarge)], ids=["stalled", "too large"]
)
async def test_nothing_is_kept_of_one_that_fails(end: bytes, error: type[LoraFsError]) -> None:
    """Its room is the next one's."""
    intake = Intake(LARGE, idle_s=0.05)
    for _ in range(5):
        with pytest.raises(error):
            await read(intake, sending(b"x" * LARGE, end, b""))
    assert not intake._incomplete
    assert not intake._coming
    assert len(await read(intake, sending(b"x" * LARGE))) == LARGE


async def test_a_client_that_leaves() -> None:
    """Nobody waits for an answer."""

    async def gone() -> Message:
        return {"type": "http.disconnect"}

    with pytest.raises(ClientDisconnect):
        await read(Intake(8), gone)


async def test_small_ones_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have a room of their own: who fills it keeps no large one out, and one that grows leaves it."""
    monkeypatch.setattr("lora_fs.sidecar.server.middleware.body_limit.SMALL_ROOM_BYTES", 2 * SMALL_BYTES)
    intake, small = Intake(LARGE), b"x" * SMALL_BYTES
    for _ in range(3):
        async with intake.read(request(), sending(small)), intake.read(request(), sending(small)):
            with pytest.raises(TemporaryError, match="too many requests"):
                await read(intake, sending(b"x"))
            assert len(await read(intake, sending(b"x" * LARGE))) == LARGE
        async with intake.read(request(), sending(small)), intake.read(request(), sending(small[:-1], b"xx")):
            assert await read(intake, sending(b"x")) == b"x"


async def test_a_stall_of_our_own_loop_is_no_clients_pause() -> None:
    """While the loop stands still nothing is read, whoever sends. A body whose rest lies in the kernel since
    then gives way to nobody."""
    intake, sent, fed = Intake(LARGE), asyncio.Event(), asyncio.Event()

    async def receive() -> Message:
        if not fed.is_set():
            fed.set()
            return {"type": "http.request", "body": b"x" * (LARGE - 1), "more_body": True}
        await sent.wait()
        return {"type": "http.request", "body": b"x", "more_body": False}

    async with intake.read(request(), sending(b"x" * LARGE)):
        reading = asyncio.create_task(read(intake, receive))
        await fed.wait()
        await asyncio.sleep(0)
        time.sleep(2 * PAUSE_S)  # noqa: ASYNC251
        with pytest.raises(TemporaryError, match="too many large requests"):
            await read(intake, sending(b"x" * LARGE))
        sent.set()
        assert len(await reading) == LARGE


@pytest.mark.parametrize("unread", [0, 1])
async def test_one_that_pauses_gives_way(unread: int) -> None:
    """Its client hears that it was slow; who needs the room has it. Time in which the loop read counts. A
    client that sent all of its body does not pause, whatever of it waits here."""
    intake, fed = Intake(LARGE), asyncio.Event()

    async def receive() -> Message:
        if not fed.is_set():
            fed.set()
            return {"type": "http.request", "body": b"x" * (LARGE - 1), "more_body": True}
        await asyncio.Event().wait()
        raise AssertionError

    async with intake.read(request(), sending(b"x" * LARGE)):
        reading = asyncio.create_task(read(intake, receive, str(LARGE), unread))
        await fed.wait()
        began = intake.time()
        while intake.time() - began <= PAUSE_S:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        if unread:
            with pytest.raises(TemporaryError, match="too many"):
                await read(intake, sending(b"x" * LARGE))
            reading.cancel()
            return
        assert len(await read(intake, sending(b"x" * LARGE))) == LARGE
        with pytest.raises(TemporaryError, match="gave way"):
            await reading


async def test_one_of_which_nothing_came_is_not_asked_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the slowest, and has none: the search would never end."""
    monkeypatch.setattr("lora_fs.sidecar.server.middleware.body_limit.SMALL_ROOM_BYTES", 2 * SMALL_BYTES)
    intake, small = Intake(LARGE), b"x" * SMALL_BYTES
    empty = asyncio.create_task(read(intake, sending(b"")))
    pauses = asyncio.create_task(read(intake, sending(small[1:], b"")))
    await asyncio.sleep(0)
    began = intake.time()
    while intake.time() - began <= PAUSE_S:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    async with intake.read(request(), sending(small)):
        assert await read(intake, sending(small)) == small
    with pytest.raises(TemporaryError, match="gave way"):
        await pauses
    empty.cancel()


async def test_a_body_costs_the_same_beside_many() -> None:
    """Others are looked through only where there is no room. 500 stalled bodies held up the first request
    beside them for seconds."""

    async def cost(others: int) -> float:
        """The least processor time of 200 pieces of one body, beside so many others of the same caller."""
        intake, piece, one = Intake(LARGE), b"x" * 64, request()

        async def stalled() -> None:
            async with intake.read(one, sending(piece, b"", b"")):
                pass

        waiting = [asyncio.create_task(stalled()) for _ in range(others)]
        for _ in range(4):
            await asyncio.sleep(0)
        least = math.inf
        for _ in range(5):
            began = time.process_time()
            async with intake.read(one, sending(*[piece] * 200)):
                least = min(least, time.process_time() - began)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        return least

    assert await cost(2000) < 5 * await cost(1)


async def test_one_that_drips(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on for ever, and is given up all the same."""
    monkeypatch.setattr("lora_fs.sidecar.server.middleware.body_limit.LEAST_BYTES_S", 1 << 30)

    async def receive() -> Message:
        await asyncio.sleep(0.01)
        return {"type": "http.request", "body": b"x", "more_body": True}

    with pytest.raises(InputError, match="too slowly"):
        await read(Intake(LARGE, idle_s=0.1), receive)


async def test_one_that_is_large_and_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has come gives it time for more."""
    monkeypatch.setattr("lora_fs.sidecar.server.middleware.body_limit.LEAST_BYTES_S", 1)
    idle_s, sent = 0.2, iter(range(8))

    async def receive() -> Message:
        await asyncio.sleep(idle_s / 4)
        return {"type": "http.request", "body": b"x" * 9, "more_body": next(sent) < 7}

    assert len(await read(Intake(LARGE, idle_s=idle_s), receive)) == 72
