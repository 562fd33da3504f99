"""What waits when the server ends, and what does not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from starlette.types import Message, Receive, Scope, Send

from lora_fs.sidecar.errors import EngineUnavailable
from lora_fs.worker_patch.api.ending import Ending
from tests.plugin.test_gate import Site

pytestmark = pytest.mark.anyio

BOUND_S = 10


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_a_request_that_waits_for_its_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Is answered 503 at once, and so is the next; one that needs no adapter is vLLM's."""
    site, waits = Site(), asyncio.Event()

    @asynccontextmanager
    async def hold(name: str, timeout_s: float) -> AsyncIterator[str]:
        waits.set()
        await asyncio.sleep(BOUND_S * 2)
        yield name

    monkeypatch.setattr(site.replica, "hold", hold)
    async with site.http:
        asking = asyncio.create_task(site.http.post("/v1/completions", json={"model": "sql"}))
        await asyncio.wait_for(waits.wait(), BOUND_S)
        site.gate._ending.begin()
        answers = [
            await asyncio.wait_for(asking, BOUND_S),
            await site.http.post("/v1/completions", json={"model": "sql"}),
        ]
        for answer in answers:
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert "this server ends" in answer.json()["error"]["message"]
        assert (await site.http.post("/v1/completions", json={"model": "tiny"})).status_code == 200


async def test_an_answer_that_has_begun() -> None:
    """Goes on to its end; one of the same routes that has not is ended."""
    ending, ends = Ending(), asyncio.Event()
    sent: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/begun":
            await send({"type": "http.response.start", "status": 200})
        await ends.wait()
        await send({"type": "http.response.body"})

    async def receive() -> Message:
        return {"type": "http.request"}

    async def send(message: Message) -> None:
        sent.append(message)

    async def ask(path: str) -> None:
        await ending.bounds(app)({"path": path}, receive, send)

    begun, waiting = asyncio.create_task(ask("/begun")), asyncio.create_task(ask("/waiting"))
    await asyncio.sleep(0.05)
    ending.begin()
    with pytest.raises(EngineUnavailable):
        await asyncio.wait_for(waiting, BOUND_S)
    ends.set()
    await asyncio.wait_for(begun, BOUND_S)
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]


async def test_the_end_is_seen() -> None:
    """Once, and soon; it is not looked for after the context."""
    ending, seen = Ending(), asyncio.Event()
    state = {"ends": False}
    async with ending.watched(lambda: state["ends"], seen.set):
        state["ends"] = True
        await asyncio.wait_for(seen.wait(), BOUND_S)
    seen.clear()
    state["ends"] = False
    async with ending.watched(lambda: state["ends"], seen.set):
        pass
    state["ends"] = True
    await asyncio.sleep(0.3)
    assert not seen.is_set()
