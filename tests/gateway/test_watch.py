"""What replicas say of themselves, over real HTTP: a lie keeps one out, and ends no polling."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from starlette.responses import JSONResponse
from starlette.testclient import TestClient

from lora_fs.demo.process import free_port
from lora_fs.sidecar.errors import TemporaryError
from lora_fs.sidecar.gateway import watch as watching
from lora_fs.sidecar.gateway.app import create_gateway
from lora_fs.sidecar.gateway.discovery import Given
from lora_fs.sidecar.gateway.routing import Router
from lora_fs.sidecar.gateway.view import view
from lora_fs.sidecar.gateway.watch import Seen, Watch

TRUE: dict[str, Any] = {
    "replica": "r0",
    "ready": True,
    "model": {"name": "tiny", "served_names": ["tiny"]},
    "lora": {"loaded_loras": {}, "lora_capacity": {"available_slots": 2, "loaded_count": 0}},
}
LIES = {
    "a depth that Python does not read": "[" * 100_000 + "]" * 100_000,
    "slots without end": json.dumps(TRUE).replace('"available_slots": 2', '"available_slots": 1e999'),
    "slots that are no number": json.dumps(TRUE).replace('"available_slots": 2', '"available_slots": NaN'),
    "a list": "[]",
    "no JSON": "<html>",
    "a model that is a word": json.dumps({**TRUE, "model": "tiny"}),
    "a queue without end": json.dumps({**TRUE, "queue": {"running": 0, "waiting": 1}}).replace(
        '"waiting": 1', '"waiting": 1e999'
    ),
    "a queue that is a list": json.dumps({**TRUE, "queue": [1]}),
    "adapters that are a list": json.dumps({**TRUE, "lora": {"loaded_loras": ["a"], "lora_capacity": 3}}),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_replica_that_lies_is_out_until_it_tells_the_truth(
    lie: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is polled on: what it says next counts."""
    monkeypatch.setattr(watching, "POLL_S", 0.01)

    async def scenario() -> None:
        told, polled = json.dumps(TRUE), asyncio.Event()

        async def metadata(_: web.Request) -> web.Response:
            polled.set()
            return web.Response(text=told)

        async def until(holds: Callable[[], bool]) -> None:
            async with asyncio.timeout(60):
                while not holds():  # looked at anew at each poll
                    polled.clear()
                    await polled.wait()

        app = web.Application()
        app.router.add_get("/metadata", metadata)
        runner, port = web.AppRunner(app), free_port()
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        router = Router(time.monotonic)
        watch = Watch(router, Given([f"http://127.0.0.1:{port}"]), time.monotonic, headers={})
        async with aiohttp.ClientSession() as session, watch.running(session):
            await until(lambda: len(router.peers) == 1)
            told = LIES[lie]
            await until(lambda: not router.peers)
            (seen,) = watch.seen.values()
            assert seen.why.startswith("its /metadata is none: ")
            told = json.dumps({**TRUE, "model": {"name": "tiny", "served_names": ["tiny", "sql"]}})
            await until(lambda: len(router.peers) == 1)
            assert watch.base_names == {"tiny", "sql"}
            told = json.dumps(TRUE)
            await until(lambda: watch.base_names == {"tiny"})  # sql is an adapter, and has homes again
        await runner.cleanup()

    asyncio.run(scenario())


def test_a_name_that_is_none_is_unknown_for_now() -> None:
    """A label that DNS cannot have is no failure of the gateway."""
    with pytest.raises(TemporaryError, match="is not resolved"):
        asyncio.run(Given([f"dns://{'a' * 64}.svc:8001"]).find())


def test_a_view_of_the_fleet_says_why_a_replica_is_out() -> None:
    """Also of one that never answered. What is known of one that is out stays, and it has no requests."""
    router = Router(lambda: 10.0)
    watch = Watch(router, Given(()), lambda: 10.0, headers={})
    router.report("r0", ["a", "b"], 4, 9.0)
    said: dict[str, Any] = {"answered_at": 9.5, "queue": (3, 5)}
    watch.seen["http://10.0.0.1:8001"] = Seen("http://10.0.0.1:8001", "r0", "", **said)
    watch.seen["http://10.0.0.2:8001"] = Seen("http://10.0.0.2:8001", "r1", "it is not ready", **said)
    watch.seen["http://10.0.0.3:8001"] = Seen("http://10.0.0.3:8001")
    seen = view(router, watch, 12.0, "a")
    rows = [(one.replica, one.state, one.why, one.seen_s, one.capacity) for one in seen.replicas]
    assert rows == [
        ("r0", "ready", "", 2.5, 4),
        ("r1", "out", "it is not ready", 2.5, None),
        (None, "out", "it was not asked yet", None, None),
    ]
    queues = [one.queue and (one.queue.running, one.queue.waiting) for one in seen.replicas]
    assert queues == [(3, 5), None, None]  # of one that is out, it is of long ago
    assert (seen.order, seen.waiting, view(router, watch, 12.0).order) == (["r0"], 0, None)
    named = {**TRUE, "replica": "\ud800", "version": "\ud800" * 2000}
    watch._learn(watch.seen["http://10.0.0.3:8001"], named, 9.0)
    assert b"?" in JSONResponse(view(router, watch, 12.0).model_dump(mode="json")).body


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [("GET", "/v1/load_lora_adapter", "POST"), ("POST", "/v1/fleet", "GET, HEAD"), ("GET", "/pause", "POST")],
)
def test_another_method_on_the_gateways_own_path(method: str, path: str, allowed: str) -> None:
    """405 with what the path takes: it is passed to no replica."""
    answer = TestClient(create_gateway(Given(()))).request(method, path)
    assert (answer.status_code, answer.headers.get("allow")) == (405, allowed), answer.text
