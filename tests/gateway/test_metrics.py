"""The gateway's series, and the table that describes them."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
from aiohttp import web
from aiohttp.typedefs import Handler

from lora_fs.demo.process import LOCAL
from lora_fs.sidecar.gateway.app import create_gateway
from lora_fs.sidecar.gateway.choice import LOADS, Reason
from lora_fs.sidecar.gateway.discovery import Given
from lora_fs.sidecar.gateway.homes import order
from lora_fs.sidecar.gateway.metrics import Metrics
from lora_fs.sidecar.gateway.outliers import FAILURES, Outcome
from lora_fs.sidecar.gateway.routing import Router, Ticket
from lora_fs.sidecar.gateway.watch import Seen, Watch
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


def test_each_series_says_what_the_gateway_counted() -> None:
    """The requests by the reason of their choice and by replica, and the replicas by state."""
    router = Router(lambda: 10.0)
    for name in ("r0", "r1"):
        router.report(name, ["a"], 4, 9.0)
    watch = Watch(router, Given(()), lambda: 10.0, headers={})
    whys = {"r0": "", "r1": "", "r2": "it is not ready"}
    watch.seen |= {f"http://{name}:1": Seen(f"http://{name}:1", name, why) for name, why in whys.items()}
    watch.seen["http://r3:1"] = Seen("http://r3:1")  # it never answered
    metrics = Metrics(router, watch)
    here = order("a", frozenset({"r0", "r1"}))[0]
    for _ in range(2):
        router.ask(Ticket("a", lambda _: None))
    for number in range(2 * LOADS + 1):  # the last one waits
        router.ask(Ticket(f"b{number}", lambda _: None))
    router.ask(Ticket(None, lambda _: None))
    for _ in range(FAILURES):
        router.told(here, Outcome.FAILED)
    metrics.retried = 3
    metrics.queued.observe(0.5)
    told = metrics.registry.get_sample_value
    choices = {one: told("lora_fs_gateway_choices_total", {"reason": one.value}) for one in Reason}
    assert choices == {one: None if one is Reason.WAIT else router.chosen[one] for one in Reason}
    assert (choices[Reason.RESIDENT], choices[Reason.COLD], choices[Reason.BASE]) == (2, 2 * LOADS, 1)
    flights = {one.name: told("lora_fs_gateway_in_flight", {"replica": one.name}) for one in router.peers}
    assert flights == {one.name: one.in_flight for one in router.peers}
    assert sum(one or 0 for one in flights.values()) == 2 + 2 * LOADS + 1
    states = ("ready", "ejected", "out")
    assert [told("lora_fs_gateway_replicas", {"state": one}) for one in states] == [1, 1, 2]
    alone = ("waiting", "retries_total", "ejections_total", "queue_seconds_count", "queue_seconds_sum")
    assert [told(f"lora_fs_gateway_{one}") for one in alone] == [1, 3, 1, 1, 0.5]


def test_adapters_names_make_no_series() -> None:
    """Clients choose the names: a gateway with 10,000 of them has as many series as one with none."""
    router = Router(lambda: 10.0)
    router.report("r0", [], None, 9.0)
    metrics = Metrics(router, Watch(router, Given(()), lambda: 10.0, headers={}))

    def series() -> int:
        return sum(len(family.samples) for family in metrics.registry.collect())

    before = series()
    for number in range(10_000):
        router.ask(Ticket(f"a{number}", lambda _: None))
    assert router.waiting == 10_000 - LOADS
    assert series() == before


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
                    scraped = (await http.get("/metrics")).text
                    assert "lora_fs_gateway_retries_total 0.0" in scraped
                    assert "\nprocess_open_fds " in scraped

    asyncio.run(scenario())


@asynccontextmanager
async def before_two(**answers: Handler) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a gateway whose two replicas answer every POST as said, by their ids."""

    def metadata(name: str) -> Handler:
        async def told(_: web.Request) -> web.Response:
            return web.json_response({**TRUE, "replica": name})

        return told

    async with AsyncExitStack() as stack:
        urls = [
            await stack.enter_async_context(stand_in(metadata(name), all=answer))
            for name, answer in answers.items()
        ]
        gateway = stack.enter_context(serving(create_gateway(Given(urls))))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=gateway, **LOCAL))
        while len((await http.get("/health")).json()["ready"]) < 2:
            pass
        yield http


async def served(_: web.Request) -> web.Response:
    return web.json_response({})


def test_a_request_that_another_replica_takes_is_a_retry() -> None:
    """The first one has lost its engine."""
    first, other = order("a", frozenset({"r0", "r1"}))

    async def gone(_: web.Request) -> web.Response:
        return web.Response(status=503, headers={NAME: "EngineGone"})

    async def scenario() -> None:
        async with before_two(**{first: gone, other: served}) as http, asyncio.timeout(60):
            while "lora_fs_gateway_retries_total 0.0" in (await http.get("/metrics")).text:
                assert (await http.post("/v1/completions", json={"model": "a"})).status_code == 200

    asyncio.run(scenario())


def test_a_replica_that_says_when_to_ask_again_is_not_ejected_and_its_answer_counts() -> None:
    """As a paused engine's: no other replica is asked."""
    first, other = order("a", frozenset({"r0", "r1"}))
    asked = 0

    async def later(_: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        return web.Response(status=503, headers={"Retry-After": "7"})

    async def scenario() -> None:
        async with before_two(**{first: later, other: served}) as http, asyncio.timeout(60):
            while asked < 2 * FAILURES:
                answer = await http.post("/v1/completions", json={"model": "a"})
                assert answer.status_code == 200 or answer.headers["retry-after"] == "7"
                assert not (await http.get("/health")).json()["ejected"]
            assert "lora_fs_gateway_retries_total 0.0" in (await http.get("/metrics")).text

    asyncio.run(scenario())


def test_replicas_that_break_off_are_ejected_as_those_that_fail() -> None:
    """The first of two: the other one gets the next request, whatever it does."""

    async def broken(request: web.Request) -> web.Response:
        await request.read()
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async def scenario() -> None:
        async with before_two(r0=broken, r1=broken) as http, asyncio.timeout(60):
            while not (await http.get("/health")).json()["ejected"]:
                assert (await http.post("/v1/completions", json={"model": "a"})).status_code == 503

    asyncio.run(scenario())


def test_a_call_without_a_body_that_breaks_off_goes_to_no_other_replica() -> None:
    """It may have run. The answer says so."""
    asked = 0

    async def broken(request: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async def scenario() -> None:
        async with before_two(r0=broken, r1=broken) as http, asyncio.timeout(60):
            answer = await http.post("/v1/completions")
            assert (answer.status_code, asked) == (503, 1)
            assert "the request may have run" in answer.text

    asyncio.run(scenario())
