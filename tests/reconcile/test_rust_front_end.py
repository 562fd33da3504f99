"""vLLM's Rust front end words its answers in its own way: here are those of 0.33, as it gave them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web

from lora_fs.sidecar.engine.vllm_http import VllmHttp
from lora_fs.sidecar.errors import NameTaken
from tests.reconcile.test_plan import RECORD

pytestmark = pytest.mark.anyio

HELD = {"support@a0": "/stage/a0/support"}


def error(message: str, kind: str, param: str, code: int) -> web.Response:
    """Its error object."""
    body = {"error": {"message": message, "type": kind, "param": param, "code": code}}
    return web.json_response(body, status=code)


async def models(_: web.Request) -> web.Response:
    cards = [{"id": "tiny", "owned_by": "vllm-frontend-rs", "root": "/tiny", "parent": None}]
    cards += [{"id": name, "root": path, "parent": "tiny"} for name, path in HELD.items()]
    return web.json_response({"object": "list", "data": cards})


async def load(request: web.Request) -> web.Response:
    name = (await request.json())["lora_name"]
    message = (
        f"LoRA adapter `{name}` is already loaded. If you want to load the adapter in place, set "
        "'load_inplace' to true."
    )
    return error(message, "BadRequestError", "lora_name", 400)


async def unload(request: web.Request) -> web.Response:
    name = (await request.json())["lora_name"]
    return error(f"The model `{name}` does not exist.", "NotFoundError", "model", 404)


@pytest.fixture
async def engine() -> AsyncIterator[VllmHttp]:
    """A client of a front end that has one adapter; a GET of its load route is 405, without a word."""
    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/load_lora_adapter", load)
    app.router.add_post("/v1/unload_lora_adapter", unload)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    async with aiohttp.ClientSession() as session:
        yield VllmHttp(session, f"http://{host}:{port}", timeout_s=10)
    await runner.cleanup()


async def test_a_load_that_was_answered_twice(engine: VllmHttp) -> None:
    """The same copy under the same name is loaded; another copy finds the name taken."""
    await engine.load("support@a0", "/stage/a0/support", RECORD)
    with pytest.raises(NameTaken):
        await engine.load("support@a0", "/stage/b1/support", RECORD)


async def test_an_unload_of_what_is_not_there(engine: VllmHttp) -> None:
    """It is as good as done."""
    await engine.unload("gone@c2")


async def test_its_load_route_is_found(engine: VllmHttp) -> None:
    """It can load, and its adapters are told from its base model."""
    found = await engine.loaded()
    assert found.cannot_load is None
    assert found.adapters == HELD
