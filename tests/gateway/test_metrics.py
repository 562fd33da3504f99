"""The gateway's series, and the table that describes them."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path

import httpx
from aiohttp import web

from lora_fs.demo.process import LOCAL
from lora_fs.sidecar.gateway.app import create_gateway
from lora_fs.sidecar.gateway.discovery import Given
from lora_fs.sidecar.gateway.metrics import Metrics
from lora_fs.sidecar.gateway.routing import Router
from lora_fs.sidecar.gateway.watch import Watch
from lora_fs.sidecar.server.middleware.errors import NAME
from tests.gateway.conftest import stand_in
from tests.gateway.test_watch import TRUE
from tests.server.conftest import serving

PAGE = Path(__file__).parents[2] / "docs/howto/fleet.md"
KINDS = {"counter": "_total", "gauge": "", "histogram": ""}


def test_the_table_has_every_series_of_the_gateway_and_no_other() -> None:
    """Each metric stands in the table with its kind and its labels."""
    router = Router(time.monotonic)
    router.report("r0", [], None, 0.0)
    metrics = Metrics(router, Watch(router, Given(()), time.monotonic, headers={}))
    exposed = {
        (family.name + KINDS[family.type], family.type, tuple(sorted(_labels(family.samples[0].labels))))
        for family in metrics.registry.collect()
        if family.name.startswith("lora_fs_gateway")
    }
    rows = re.findall(r"^\| `(lora_fs_gateway_\w+)` \| (\w+) \| (.+?) \|", PAGE.read_text(), re.MULTILINE)
    assert {(name, kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows} == exposed


def _labels(labels: dict[str, str]) -> set[str]:
    return labels.keys() - {"le"}


def test_a_request_that_no_other_replica_takes_is_no_retry() -> None:
    """The only replica has lost its engine: the gateway sends the request nowhere else."""

    async def scenario() -> None:
        async def metadata(_: web.Request) -> web.Response:
            return web.json_response(TRUE)

        async def gone(_: web.Request) -> web.Response:
            return web.Response(status=503, headers={NAME: "EngineGone"})

        async with stand_in(metadata, all=gone) as url:
            with serving(create_gateway(Given([url]))) as gateway:
                async with httpx.AsyncClient(base_url=gateway, **LOCAL) as http:
                    while (await http.get("/health")).status_code != 200:
                        pass
                    assert (await http.post("/v1/completions", json={"model": "a"})).status_code == 503
                    assert "lora_fs_gateway_retries_total 0.0" in (await http.get("/metrics")).text

    asyncio.run(scenario())
