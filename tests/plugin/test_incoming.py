"""A request as the gate takes it in: where it goes, and how much of a body it reads."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message

from lora_fs.sidecar.errors import TooLarge
from lora_fs.worker_patch.api.incoming import Incoming, route_of

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.parametrize(
    ("root", "path", "route"),
    [
        ("", "/v1/models", "/v1/models"),
        ("/v1", "/v1/v1/models", "/v1/models"),
        ("/v1", "/v1/models", "/models"),
        ("/v", "/v1/models", "/v1/models"),
    ],
)
def test_the_prefix_is_of_whole_segments(root: str, path: str, route: str) -> None:
    assert route_of({"type": "http", "path": path, "root_path": root}) == route


@pytest.mark.parametrize("most", [5, 4])
async def test_a_body_may_have_as_many_bytes_as_its_bound(most: int) -> None:
    chunks: list[Message] = [
        {"type": "http.request", "body": b"abc", "more_body": True},
        {"type": "http.request", "body": b"de", "more_body": False},
    ]

    async def receive() -> Message:
        return chunks.pop(0)

    incoming = Incoming(receive)
    if most == 5:
        assert await incoming.read(most) == b"abcde"
        assert (await incoming.receive())["body"] == b"abcde"
    else:
        with pytest.raises(TooLarge, match="over 4 bytes"):
            await incoming.read(most)


async def test_who_listens_no_more_leaves_nothing_behind() -> None:
    """The server's own task for the next message ends with the request."""
    ended = asyncio.Event()

    async def receive() -> Message:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        raise AssertionError("nothing comes")

    incoming = Incoming(receive)
    async with incoming.while_it_waits():
        await asyncio.sleep(0)
    incoming.close()
    await asyncio.wait_for(ended.wait(), 60)
