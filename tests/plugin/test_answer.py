"""An answer that breaks: what its client gets, by how far it had come."""

from __future__ import annotations

import pytest
from starlette.types import Message

from lora_fs.sidecar.errors import EngineUnavailable
from lora_fs.worker_patch.api.answer import Answer, uncut
from tests.reconcile.test_plan import RECORD

pytestmark = pytest.mark.anyio
LOST = EngineUnavailable("a worker of the engine lost sql: no memory")
LAST = b"data: {}\n\n"


class Client:
    def __init__(self) -> None:
        self.got: list[Message] = []
        self.answer = Answer(RECORD, self.take)

    async def take(self, message: Message) -> None:
        self.got.append(message)

    async def begin(self, kind: bytes) -> None:
        headers = [(b"Content-Type", kind)]
        await self.answer.send({"type": "http.response.start", "status": 200, "headers": headers})


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_nothing_was_sent() -> None:
    """The error is the whole answer, which the gate makes."""
    client = Client()
    with pytest.raises(EngineUnavailable, match="no memory"):
        await client.answer.broken(LOST, LAST)
    assert client.got == []


async def test_a_streams_last_event_is_the_error() -> None:
    """The gate says it as the clients of the request's route expect it."""
    client = Client()
    await client.begin(b"text/event-stream; charset=utf-8")
    await client.answer.send({"type": "http.response.body", "body": b"data: {}\n\n", "more_body": True})
    await client.answer.broken(LOST, LAST)
    assert (client.got[-1]["body"], client.got[-1]["more_body"]) == (LAST, False)


async def test_another_answer_is_cut() -> None:
    """It is no complete one: its connection ends."""
    client = Client()
    await client.begin(b"application/json")
    with pytest.raises(ConnectionError, match="no memory"):
        await client.answer.broken(LOST, LAST)


async def test_what_breaks_after_a_cut_answer_is_the_end_of_the_engine() -> None:
    """The client has nothing of that answer yet, and gets the error that says so."""
    client = Client()

    async def answered() -> None:
        with uncut(client.take, lambda: True) as sending:
            await sending({"type": "http.response.start", "status": 500, "headers": []})
            raise RuntimeError("a background task's")

    with pytest.raises(EngineUnavailable, match="this server ends"):
        await answered()
    assert client.got == []
