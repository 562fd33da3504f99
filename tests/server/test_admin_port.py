"""Which port answers which route, of all that the sidecar has."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest
from fastapi.routing import APIRoute

from lora_fs.sidecar.server.app import OPENAPI, create_app
from lora_fs.sidecar.server.middleware.access import Admin
from lora_fs.sidecar.server.middleware.admin_port import BOTH
from tests.server.conftest import FakeReplica

pytestmark = pytest.mark.anyio
INFERENCE, OPERATIONS = 8001, 8002


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_every_route_of_the_sidecars_own(tmp_path: Path) -> None:
    """The admin port alone answers each one, but for four lists of what is served, which change nothing."""
    file = tmp_path / "tokens"
    file.write_text("all-of-it-4711 name=operators\n")
    app = create_app(FakeReplica(), engine_url="http://127.0.0.1:9", admin=Admin(file), admin_port=OPERATIONS)
    own = {(method, one.path) for one in app.routes if isinstance(one, APIRoute) for method in one.methods}
    assert {("POST", "/pause"), ("POST", "/resume"), ("GET", "/server_info"), ("GET", "/metadata")} <= own
    apart, shared = set[tuple[str, str]](), set[tuple[str, str]]()
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)  # a fake replica lacks much
    for method, path in sorted({*own, ("GET", OPENAPI)}):
        told = {}
        for port in (INFERENCE, OPERATIONS):
            async with httpx.AsyncClient(transport=transport, base_url=f"http://sidecar:{port}") as client:
                answer = await client.request(method, re.sub("{.*?}", "x", path))
                told[port] = "this path is served on" in answer.text
        assert not told[OPERATIONS], (method, path)
        (apart if told[INFERENCE] else shared).add((method, path))
    assert {path.partition("/{")[0] for _, path in shared} == set(BOTH)
    assert {method for method, _ in shared} == {"GET"}


async def test_other_methods_are_refused_on_the_same_port() -> None:
    """A method that a route lacks gets 405 where the route is, and below it lies nothing of the engine's."""
    app = create_app(FakeReplica(), engine_url="http://127.0.0.1:9", admin=Admin(None), admin_port=OPERATIONS)
    for path, status in (("/pause", 405), ("/v1/loras", 405), (OPENAPI, 405), ("/v1/lora_adapters/x/y", 405)):
        found = []
        for port in (INFERENCE, OPERATIONS):
            base = f"http://sidecar:{port}"
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=base) as client:
                found.append((await client.put(path)).status_code)
        assert found == [404, status], path


async def test_the_document_says_which_port() -> None:
    """A router learns from `/metadata` where operations are answered; null: on every port."""
    for port in (OPERATIONS, None):
        app = create_app(FakeReplica(), engine_url="http://127.0.0.1:9", admin=Admin(None), admin_port=port)
        base = f"http://sidecar:{INFERENCE}"
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=base) as client:
            assert (await client.get("/metadata")).json()["admin_port"] == port
