"""Bodies on their way in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive

from lora_fs.sidecar.errors import InputError, LoraFsError, TemporaryError, TooLarge
from lora_fs.sidecar.server.middleware.body_limit import SMALL_BYTES, Intake

pytestmark = pytest.mark.anyio
LARGE = 2 * SMALL_BYTES


def sending(*chunks: bytes) -> Receive:
    """A client that sends these, and then nothing for ever."""

    async def messages() -> AsyncIterator[Message]:
        for number, chunk in enumerate(chunks, 1):
            more = number < len(chunks) or not chunk
            yield {"type": "http.request", "body": chunk, "more_body": more}
        await asyncio.Event().wait()

    return messages().__anext__


async def read(intake: Intake, receive: Receive, told: str | None = None) -> bytes:
    """What a body is when it is let go at once."""
    async with intake.read({} if told is None else {"content-length": told}, receive) as held:
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
            await stack.enter_async_context(intake.read({}, sending(b"x" * LARGE))) for _ in range(2)
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
    async with intake.read({}, sending(b"x" * LARGE)), intake.read({}, sending(b"x" * LARGE)):
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
        async with intake.read({}, sending(small)), intake.read({}, sending(small)):
            with pytest.raises(TemporaryError, match="too many requests"):
                await read(intake, sending(b"x"))
            assert len(await read(intake, sending(b"x" * LARGE))) == LARGE
        async with intake.read({}, sending(small)), intake.read({}, sending(small[:-1], b"xx")):
            assert await read(intake, sending(b"x")) == b"x"


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
