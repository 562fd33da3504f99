"""Who gets the gateway's own token. A cluster gives a dead pod's address to the next one."""

from __future__ import annotations

import asyncio
import time

import pytest
from aiohttp import web

from lora_fs.sidecar.gateway import watch as watching
from lora_fs.sidecar.gateway.discovery import Given
from lora_fs.sidecar.gateway.routing import Router
from lora_fs.sidecar.server.middleware.access import HEADER
from tests.gateway.conftest import stand_in
from tests.gateway.test_watch import TRUE, watched


@pytest.mark.parametrize("now", ["another program", "another fleet's replica"])
def test_whoever_has_the_address_of_a_replica_that_is_gone_gets_no_token(
    now: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway sends its token to an address only after that has answered as a replica of its fleet."""
    monkeypatch.setattr(watching, "POLL_S", 0.01)

    async def scenario() -> None:
        answer, shown = TRUE, asyncio.Queue[str | None]()

        async def metadata(request: web.Request) -> web.Response:
            shown.put_nowait(request.headers.get(HEADER))
            return web.json_response(answer)

        async def until(one: str | None) -> None:
            async with asyncio.timeout(60):
                while await shown.get() != one:
                    pass

        router = Router(time.monotonic)
        shows = {"headers": {HEADER: "secret"}, "model": "tiny"}
        async with stand_in(metadata) as url, watched(router, Given([url]), **shows) as watch:
            await until("secret")
            await until("secret")  # so its first answer has let it in
            answer = {"hello": "world"} if now == "another program" else {**TRUE, "model": {"name": "large"}}
            async with asyncio.timeout(60):
                while watch.ready:
                    await shown.get()
                while not shown.empty():
                    shown.get_nowait()
                assert [await shown.get() for _ in range(5)] == 5 * [None]
            answer = TRUE
            await until("secret")
            await until("secret")
            assert watch.ready == {"r0"}

    asyncio.run(scenario())
