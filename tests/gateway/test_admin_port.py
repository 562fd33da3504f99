"""Which port of a gateway answers which route."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from starlette.routing import Route

from lora_fs.demo.process import LOCAL, free_port
from lora_fs.sidecar.gateway.app import create_gateway
from lora_fs.sidecar.gateway.discovery import Given
from lora_fs.sidecar.server.app import create_app
from lora_fs.sidecar.server.middleware.access import Admin
from lora_fs.sidecar.server.middleware.admin_port import BOTH, operations
from lora_fs.sidecar.server.proxy.paths import COMMON, INFERENCE
from tests.gateway.conftest import Stubs
from tests.gateway.test_broadcast import HEADERS, TOKEN
from tests.server.conftest import FakeReplica

pytestmark = pytest.mark.anyio
REQUESTS, OPERATIONS = 8001, 8002


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def only(path: str, transport: httpx.ASGITransport) -> int | None:
    """The port that alone answers a path; None: both do."""
    refusing = set[int]()
    for port in (REQUESTS, OPERATIONS):
        async with httpx.AsyncClient(transport=transport, base_url=f"http://gateway:{port}") as client:
            answer = await client.get(path)
            if answer.status_code == 404 and "this path is served on" in answer.text:
                refusing.add(port)
    assert len(refusing) < 2, path
    return OPERATIONS if refusing == {REQUESTS} else REQUESTS if refusing else None


async def test_each_route() -> None:
    """The admin port answers its own routes and a replica's operations, the other one models."""
    app = create_gateway(Given(()), admin_port=OPERATIONS)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)  # it does not run: no replica is asked
    for route in app.routes:
        assert isinstance(route, Route)
        if route.path in (*COMMON, *INFERENCE, "/v1/{path:path}"):
            assert await only(re.sub("{.*?}", "x", route.path), transport) == REQUESTS, route.path
        elif route.path not in BOTH:
            assert await only(re.sub("{.*?}", "x", route.path), transport) == OPERATIONS, route.path
    sidecar = create_app(FakeReplica(), engine_url="http://127.0.0.1:9", admin=Admin(None))
    passed_on = {path for path in operations(sidecar.routes) if path.startswith("/v1/")}
    passed_on -= {*COMMON, "/v1"}
    assert "/v1/lora_adapters" in passed_on
    for path in passed_on:
        assert await only(path, transport) == OPERATIONS, path
    for path in BOTH:
        assert await only(path, transport) is None, path


def test_a_fleet_behind_it(fleet: Stubs, tmp_path: Path, complete: Callable[..., httpx.Response]) -> None:
    """Operators unload an adapter from all replicas by one port, clients ask for another by the other."""
    file = tmp_path / "tokens"
    file.write_text(f"{TOKEN}\n")
    file.chmod(0o600)
    fleet.add(env={"LORA_FS_TOKEN_FILE": str(file)})
    port = free_port()
    gateway, admin = fleet.gateway(LORA_FS_ADMIN_PORT=str(port)), f"http://127.0.0.1:{port}"
    gateway.wait_ready("/health")
    answers = [
        httpx.post(f"{url}/v1/unload_lora_adapter", json={"lora_name": "a0"}, headers=HEADERS, **LOCAL)
        for url in (gateway.url, admin)
    ]
    assert [answer.status_code for answer in answers] == [404, 200], answers[1].text
    assert f"port {port}" in answers[0].text
    assert [complete(url, "a1").status_code for url in (gateway.url, admin)] == [200, 404]
    assert [complete(url, "a0").status_code for url in (gateway.url, admin)] == [404, 404]
