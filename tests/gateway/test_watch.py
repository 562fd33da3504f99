"""What replicas say of themselves, over real HTTP: a lie keeps one out, and ends no polling."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import aiohttp
import pytest
from aiohttp import web
from aiohttp.abc import AbstractResolver, ResolveResult
from starlette.responses import JSONResponse
from starlette.testclient import TestClient

from lora_fs.demo.process import free_port
from lora_fs.sidecar.errors import InputError, TemporaryError, VolumeUnavailable
from lora_fs.sidecar.gateway import discovery
from lora_fs.sidecar.gateway import watch as watching
from lora_fs.sidecar.gateway.address import Resolver, checked
from lora_fs.sidecar.gateway.app import create_gateway
from lora_fs.sidecar.gateway.discovery import Discovery, Given, Registered
from lora_fs.sidecar.gateway.forward import MOST_NAME
from lora_fs.sidecar.gateway.outliers import Outcome
from lora_fs.sidecar.gateway.routing import Router, Ticket
from lora_fs.sidecar.gateway.view import view
from lora_fs.sidecar.gateway.watch import Seen, Watch
from lora_fs.sidecar.model import ReplicaStatus
from lora_fs.sidecar.reconcile.watch.reports import Look
from lora_fs.sidecar.registry.format.layout import Layout
from lora_fs.sidecar.registry.format.sealed import seal
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.server.middleware.access import HEADER
from tests.gateway.conftest import stand_in

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
    "counts whose sum JSON does not write": json.dumps(TRUE).replace(
        '"available_slots": 2, "loaded_count": 0',
        f'"available_slots": {"9" * 4300}, "loaded_count": {"9" * 4300}',
    ),
    "a load that takes a word": json.dumps({**TRUE, "lora": {**TRUE["lora"], "load_seconds": "long"}}),
    "a load that takes a list": json.dumps({**TRUE, "lora": {**TRUE["lora"], "load_seconds": [1]}}),
    "a list": "[]",
    "no JSON": "<html>",
    "a model that is a word": json.dumps({**TRUE, "model": "tiny"}),
    "names that are a word": json.dumps({**TRUE, "model": {"name": "tiny", "served_names": "sql"}}),
    "a queue without end": json.dumps({**TRUE, "queue": {"running": 0, "waiting": 1}}).replace(
        '"waiting": 1', '"waiting": 1e999'
    ),
    "a queue that is a list": json.dumps({**TRUE, "queue": [1]}),
    "no id": json.dumps({**TRUE, "replica": ""}),
    "an id that is null": json.dumps({**TRUE, "replica": None}),
    "a time of 20,000 letters": json.dumps(
        {
            **TRUE,
            "lora": {**TRUE["lora"], "loaded_loras": {"a": {"revision": "v1", "last_used": "x" * 20_000}}},
        }
    ),
    "adapters that are a list": json.dumps({**TRUE, "lora": {"loaded_loras": ["a"], "lora_capacity": 3}}),
}


@asynccontextmanager
async def watched(router: Router, discovery: Discovery, **more: Any) -> AsyncIterator[Watch]:
    """A watch of the replicas that ``discovery`` finds, which polls them."""
    watch = Watch(router, discovery, time.monotonic, **({"headers": {}} | more))
    async with aiohttp.ClientSession() as session, watch.running(session):
        yield watch


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

        router = Router(time.monotonic)
        async with stand_in(metadata) as url, watched(router, Given([url])) as watch:
            await until(lambda: len(router.peers) == 1)
            told = LIES[lie]
            await until(lambda: not router.peers)
            (seen,) = watch.seen.values()
            assert seen.why.startswith("its /metadata is none: ")
            assert len(seen.why) < 2 * watching.MOST_TEXT
            told = json.dumps({**TRUE, "model": {"name": "tiny", "served_names": ["tiny", "sql"]}})
            await until(lambda: len(router.peers) == 1)
            assert watch.base_names == {"tiny", "sql"}
            told = json.dumps(TRUE)
            await until(lambda: watch.base_names == {"tiny"})  # sql is an adapter, and has homes again

    asyncio.run(scenario())


def test_a_copy_with_two_names_takes_one_place() -> None:
    """As ``sql`` and ``sql@v1``: the fleet's view counts it once, and the router's places are names."""
    router = Router(time.monotonic)
    watch = Watch(router, Given(["http://10.0.0.1:1"]), time.monotonic, headers={})
    seen = watch.seen["http://10.0.0.1:1"] = Seen("http://10.0.0.1:1")
    names = [f"{name}{revision}" for name in ("sql", "faq") for revision in ("", "@v1")]
    loaded = {name: {"revision": "v1", "last_used": at} for at, name in enumerate(names)}
    lora = {"loaded_loras": loaded, "lora_capacity": {"available_slots": 0, "loaded_count": 2}}
    watch._learn(seen, {**TRUE, "lora": lora}, router._clock())
    (told,) = view(router, watch, time.monotonic()).replicas
    assert (told.loaded, told.capacity) == (2, 2)
    (peer,) = router.peers
    router.ask(Ticket("new", lambda _: None))
    assert set(peer.resident) == set(names[1:])


@pytest.mark.parametrize("load_s", [0.25, None])
def test_the_router_learns_what_a_load_takes(load_s: float | None) -> None:
    """A replica that has loaded nothing, or is of an older version, says nothing of it."""
    router = Router(time.monotonic)
    watch = Watch(router, Given(["http://10.0.0.1:1"]), time.monotonic, headers={})
    seen = watch.seen["http://10.0.0.1:1"] = Seen("http://10.0.0.1:1")
    for told in (TRUE, {**TRUE, "lora": {**TRUE["lora"], "load_seconds": load_s}}):
        watch._learn(seen, told, router._clock())
    (peer,) = router.peers
    assert peer.load_s == load_s


def test_a_token_that_is_replaced_takes_no_replica_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The gateway shows the new one. A replica that does not know it, yet or any more, serves on.

    One line says so.
    """
    monkeypatch.setattr(watching, "POLL_S", 0.01)
    monkeypatch.setattr(watching, "FIND_S", 0.01)

    async def scenario() -> None:
        known, file, shown = {"old"}, ["old"], asyncio.Queue[str | None]()

        async def metadata(request: web.Request) -> web.Response:
            given = request.headers.get(HEADER)
            shown.put_nowait(given)
            return web.json_response(TRUE, status=401 if given not in {None, *known} else 200)

        async def until_shown(*wanted: str | None) -> None:
            async with asyncio.timeout(60):
                for one in wanted:
                    while await shown.get() != one:
                        pass

        token: dict[str, Any] = {"headers": {HEADER: "old"}, "token": lambda: file[0]}
        router = Router(time.monotonic)
        async with stand_in(metadata) as url, watched(router, Given([url]), **token) as watch:
            await until_shown("old", "old")
            assert watch.ready == {"r0"}
            known.clear()
            await until_shown("old", None, "old", None)
            assert watch.ready == {"r0"}
            file[0] = "new"
            await until_shown("new", None)
            known.add("new")
            await until_shown("new", "new")
            assert watch.ready == {"r0"}
            assert not any(one.refuses_token for one in watch.seen.values())

    asyncio.run(scenario())
    assert len([line for line in caplog.messages if "does not know the gateway's token" in line]) == 1


def test_a_replica_of_another_fleet_is_shown_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else may have a replica's address by now."""
    monkeypatch.setattr(watching, "POLL_S", 0.01)

    async def scenario() -> None:
        shown = asyncio.Queue[str | None]()

        async def metadata(request: web.Request) -> web.Response:
            shown.put_nowait(request.headers.get(HEADER))
            return web.json_response({**TRUE, "model": {"name": "other"}})

        token: dict[str, Any] = {"headers": {HEADER: "secret"}, "model": "tiny"}
        async with stand_in(metadata) as url, watched(Router(time.monotonic), Given([url]), **token):
            async with asyncio.timeout(60):
                assert [await shown.get() for _ in range(4)] == [None] * 4

    asyncio.run(scenario())


def test_a_list_and_a_token_that_are_not_read_are_read_apart(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """While the list is not read, the gateway shows a new token; while the token is not, it finds replicas.

    The problem names both, and each is logged once.
    """
    monkeypatch.setattr(watching, "FIND_S", 0.01)

    async def scenario() -> None:
        told, looked = dict.fromkeys(("list", "token"), ""), asyncio.Event()

        class Listed:
            async def find(self) -> Mapping[str, str | None]:
                looked.set()
                if told["list"]:
                    raise TemporaryError(told["list"])
                return {}

        def token() -> str:
            if told["token"]:
                raise InputError(told["token"])
            return "old" if told["list"] == "" else "new"

        async def until(holds: Callable[[], bool]) -> None:
            async with asyncio.timeout(60):
                while not holds():  # looked at anew at each look
                    looked.clear()
                    await looked.wait()

        shown: dict[str, Any] = {"headers": {HEADER: "old"}, "token": token}
        async with watched(Router(time.monotonic), Listed(), **shown) as watch:
            await until(lambda: watch.problem == "")
            told["list"] = "no list"
            await until(lambda: watch.headers[HEADER] == "new")
            await until(lambda: watch.problem == "no list")
            told["token"] = "no token"
            await until(lambda: watch.problem == "no list; no token")
            told["list"] = ""
            await until(lambda: watch.problem == "no token")
            told["token"] = ""
            await until(lambda: watch.problem == "")

    asyncio.run(scenario())
    assert [line.message for line in caplog.records if line.name == watching.__name__] == [
        "no list",
        "no token",
    ]


class NoNames(AbstractResolver):
    """A resolver that is out of order."""

    async def resolve(self, host: str, port: int = 0, family: int = 0) -> list[ResolveResult]:
        raise OSError(None, "no answer")

    async def close(self) -> None:
        """Close nothing."""


@pytest.mark.parametrize(
    ("was_out", "host", "restarts"),
    [
        ("a request did not reach it", "127.0.0.1", True),
        ("it is not ready", "127.0.0.1", True),
        ("", "r0", False),
    ],
)
def test_a_replica_that_restarts_counts_afresh(
    was_out: str, host: str, restarts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its failures are forgotten, and so is its cache, also if it was out before it took no connection.

    One whose name is not resolved for now has both still.
    """
    monkeypatch.setattr(watching, "POLL_S", 0.01)

    async def scenario() -> None:
        url = f"http://{host}:{free_port()}"  # nobody listens
        router = Router(time.monotonic)
        watch = Watch(router, Given(()), time.monotonic, headers={})
        seen = watch.seen[url] = Seen(url)
        watch._learn(seen, TRUE, 0.0)
        router.report("r1", [], 4, 0.0)
        router._prefixes.sent((1, 2), "r0")
        while not router.ejected:
            router.told("r0", Outcome.FAILED)
        if was_out:
            watch.not_reached("r0", was_out)
        polled, out = asyncio.Event(), watch._out

        def note(*args: Any, **more: Any) -> None:
            out(*args, **more)
            polled.set()

        monkeypatch.setattr(watch, "_out", note)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(resolver=NoNames())) as session:
            polls = asyncio.create_task(watch._poll(session, seen))
            async with asyncio.timeout(60):
                await polled.wait()
            polls.cancel()
        assert "takes no connection" in seen.why
        watch._learn(seen, TRUE, 0.0)
        assert bool(router.ejected) is not restarts
        assert bool(router._prefixes.found((1, 2), ["r0", "r1"])) is not restarts

    asyncio.run(scenario())


def test_two_replicas_that_swap_their_addresses_are_both_in() -> None:
    """As containers that start anew in another order. A second address of one replica is out, though."""
    router = Router(time.monotonic)
    watch = Watch(router, Given(()), time.monotonic, headers={})
    one, two, three = (Seen(f"http://10.0.0.{number}:1") for number in range(3))
    watch.seen |= {seen.url: seen for seen in (one, two, three)}
    for first, second in ((one, two), (two, one)):
        for _ in range(2):
            watch._learn(first, {**TRUE, "replica": "r0"}, 0.0)
            watch._learn(second, {**TRUE, "replica": "r1"}, 0.0)
        at = {peer.name: watch.url_of(peer.name) for peer in router.peers}
        assert at == {"r0": first.url, "r1": second.url}
    watch._learn(three, {**TRUE, "replica": "r0"}, 0.0)
    assert three.why == f"it is the replica r0, which {two.url} is as well"


@pytest.mark.parametrize("swapped", [False, True])
def test_a_replica_that_starts_anew_at_another_address_counts_afresh(swapped: bool) -> None:
    """Its old address need not refuse connections first: it may hang, or be another replica's by now."""
    router = Router(time.monotonic)
    watch = Watch(router, Given(()), time.monotonic, headers={})
    one, two = (Seen(f"http://10.0.0.{number}:1") for number in range(2))
    watch.seen |= {seen.url: seen for seen in (one, two)}
    watch._learn(one, {**TRUE, "replica": "r0"}, 0.0)
    watch._learn(two, {**TRUE, "replica": "r1"}, 0.0)
    router._prefixes.sent((1, 2), "r1")
    while not router.ejected:
        router.told("r1", Outcome.FAILED)
    if swapped:
        watch._learn(two, {**TRUE, "replica": "r0"}, 0.0)
    else:
        watch._out(two, "it does not answer")
    watch._learn(one, {**TRUE, "replica": "r1"}, 0.0)
    watch._learn(two, {**TRUE, "replica": "r0"}, 0.0)
    assert watch.ready == {"r0", "r1"}
    assert not router.ejected
    assert not router._prefixes.found((1, 2), ["r0", "r1"])


def test_an_address_that_a_replica_left_takes_it_out_no_more() -> None:
    """And a replica that gives its address to another one is out."""
    watch = Watch(Router(time.monotonic), Given(()), time.monotonic, headers={})
    before, now = (Seen(f"http://10.0.0.{number}:1") for number in range(2))
    watch.seen |= {seen.url: seen for seen in (before, now)}
    watch._learn(before, TRUE, 0.0)
    watch._out(before, "it does not answer")
    watch._learn(now, TRUE, 0.0)
    watch._out(before, "it takes no connection", emptied=True)
    assert watch.ready == {"r0"}
    assert watch.ready is watch.ready, "a call looks at it once for each replica"
    watch._learn(now, {**TRUE, "replica": "r1"}, 0.0)
    assert watch.ready == {"r1"}


def test_replicas_that_come_and_go_leave_no_ids_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pod has an id of its own. The newest stay: a call may be under way at one that just left."""
    monkeypatch.setattr(watching, "MOST_IDS", 10)
    router = Router(time.monotonic)
    watch = Watch(router, Given(()), time.monotonic, headers={})
    stays, comes = Seen("http://10.0.0.0:1"), Seen("http://10.0.0.1:1")
    watch.seen |= {seen.url: seen for seen in (stays, comes)}
    for number in range(100):
        watch._learn(stays, TRUE, 0.0)
        watch._learn(comes, {**TRUE, "replica": f"pod-{number}"}, 0.0)
    assert len(watch._holders) == 10
    assert (watch.url_of("r0"), watch.url_of("pod-95")) == (stays.url, comes.url)


def test_a_replica_that_is_not_ready_has_its_id() -> None:
    """Also at an address that was another one's."""
    router = Router(time.monotonic)
    watch = Watch(router, Given(()), time.monotonic, headers={})
    watch.seen["http://10.0.0.0:1"] = seen = Seen("http://10.0.0.0:1")
    for replica in ("r0", "r1"):
        watch._learn(seen, {**TRUE, "replica": replica, "ready": False}, 0.0)
        assert (seen.name, seen.why, watch.ready) == (replica, "it is not ready", frozenset())


def test_what_a_replica_held_before_it_was_out_says_no_digest() -> None:
    """The adapter may have another revision since."""
    watch = Watch(Router(time.monotonic), Given(()), time.monotonic, headers={})
    watch.seen["u0"] = Seen("u0", "r0", "it is not ready", digests={"a": "old"})
    assert watch.digest_of("a") == "a"
    watch.seen["u1"] = Seen("u1", "r1", "", digests={"a": "new"})
    assert watch.digest_of("a") == "new"


@pytest.mark.parametrize("given", [None, "tiny"])
def test_a_fleet_that_changes_its_model_is_followed(given: str | None) -> None:
    """Once none of its replicas serves the former one: until then the new ones are another fleet's."""
    router = Router(time.monotonic)
    watch = Watch(router, Given(()), time.monotonic, headers={}, model=given)
    one, two = (Seen(f"http://10.0.0.{number}:1") for number in range(2))
    watch.seen |= {seen.url: seen for seen in (one, two)}

    def said(seen: Seen, model: str) -> None:
        told = {**TRUE, "replica": seen.url[-3:], "model": {"name": model}}
        watch._learn(seen, told, 0.0)

    for seen in (one, two):
        said(seen, "tiny")
    for _ in range(2):
        said(one, "other")
        assert one.why == "it serves other, and this gateway tiny"
    for seen in (two, one):
        said(seen, "other")
    assert len(router.peers) == (0 if given else 2)


def test_a_second_address_keeps_the_model_of_its_fleet() -> None:
    """A replica of another model joins none while a listed address serves the gateway's."""
    router = Router(time.monotonic)
    watch = Watch(router, Given(()), time.monotonic, headers={})
    first, second, other = (Seen(f"http://10.0.0.{number}:1") for number in range(3))
    watch.seen |= {seen.url: seen for seen in (first, second, other)}
    foreign = {**TRUE, "replica": "r1", "model": {"name": "other"}}
    for seen, told in ((first, TRUE), (second, TRUE), (other, foreign)):
        watch._learn(seen, told, 0.0)
    watch._out(watch.seen.pop(first.url), "it left", emptied=True)
    for seen, told in ((other, foreign), (second, TRUE), (other, foreign)):
        watch._learn(seen, told, 0.0)
    assert {peer.name: watch.url_of(peer.name) for peer in router.peers} == {"r0": second.url}


WRONG = {
    "a NUL": "http://r\0x:1",
    "half a bracket": "http://[::1",
    "a port": "http://r1:99999",
    "no scheme": "r1",
    "length": "http://" + "é" * 70_000 + "/path",
}


@pytest.mark.parametrize("url", WRONG.values(), ids=WRONG)
def test_a_replica_that_writes_a_wrong_address_disturbs_no_other(url: str, tmp_path: Path) -> None:
    """It is refused with the reason, which JSON can hold, and the other one is found."""
    with closing(Registry(tmp_path, create=True)) as registry:
        for replica, address in (("wrong", url), ("right", "http://10.0.0.1:8001")):
            status = ReplicaStatus(replica=replica, model="tiny", namespaces=(), url=address)
            registry.layout.replica(replica).write_bytes(seal(status))
        found = dict(asyncio.run(Registered(registry.layout, "tiny").find()))
    assert found.pop("http://10.0.0.1:8001") is None
    ((told, why),) = found.items()
    assert why is not None
    assert "address" in why
    assert len(told) + len(why) < 2000
    assert JSONResponse({told: why}).body


def test_a_fleet_with_more_replicas_than_a_gateway_asks_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are too many get no requests, and the view and the log say why."""
    monkeypatch.setattr(discovery, "MAX_REPLICAS", 2)
    with closing(Registry(tmp_path, create=True)) as registry:
        for number in range(4):
            url = f"http://10.0.0.{number}:8001"
            status = ReplicaStatus(replica=f"r{number}", model="tiny", namespaces=(), url=url)
            registry.layout.replica(status.replica).write_bytes(seal(status))
        found = dict(asyncio.run(Registered(registry.layout, "tiny").find()))
    why = found.pop(discovery.BEYOND)
    assert found == {"http://10.0.0.0:8001": None, "http://10.0.0.1:8001": None}
    assert why is not None
    assert "the others get no requests" in why


def test_a_look_at_a_slow_registry_counts_once_it_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next look reads only what changed since: what came, and what went, would never be known."""

    async def scenario(layout: Layout) -> None:
        registered, answers = Registered(layout, "tiny"), threading.Event()
        look = registered._reports.look

        def slow(own: str) -> Look:
            seen = look(own)
            answers.wait()
            return seen

        async def in_vain() -> None:
            answers.clear()
            with monkeypatch.context() as patch:
                patch.setattr(discovery, "READ_S", 0.01)
                with pytest.raises(VolumeUnavailable, match=r"are not read: no answer in 0\.01 s"):
                    await registered.find()
            answers.set()

        monkeypatch.setattr(registered._reports, "look", slow)
        for replica in ("r0", "r1"):
            status = ReplicaStatus(replica=replica, model="tiny", namespaces=(), url=f"http://{replica}:8001")
            layout.replica(replica).write_bytes(seal(status))
        await in_vain()
        assert set(await registered.find()) == {"http://r0:8001", "http://r1:8001"}
        layout.replica("r1").unlink()
        await in_vain()
        assert set(await registered.find()) == {"http://r0:8001"}

    with closing(Registry(tmp_path, create=True)) as registry:
        asyncio.run(scenario(registry.layout))


@pytest.mark.parametrize("host", ["\0", "r\0x", "\ud800", "[\0]"], ids=ascii)
def test_a_host_that_no_resolver_takes_is_refused(host: str) -> None:
    """The error says so in words that a log and JSON can hold."""
    with pytest.raises(InputError, match="the replica's address") as caught:
        checked(f"http://{host}:8001")
    assert str(caught.value).encode()
    found: dict[str, str | None] = {}
    discovery._add(found, f"http://{host}:8001")
    assert JSONResponse(found).body


@pytest.mark.parametrize("fault", [OSError("odd"), RuntimeError("odd"), ExceptionGroup("odd", [OSError()])])
def test_a_fault_of_the_gateways_own_ends_no_search_and_no_polling(
    fault: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged and reported; the next look counts."""
    monkeypatch.setattr(watching, "POLL_S", 0.01)
    monkeypatch.setattr(watching, "FIND_S", 0.01)

    async def scenario() -> None:
        looked, polled, faults = asyncio.Event(), asyncio.Event(), [fault, fault]

        class Found:
            async def find(self) -> Mapping[str, str | None]:
                looked.set()
                if faults:
                    raise faults.pop()
                return {url: None}

        async def metadata(_: web.Request) -> web.Response:
            polled.set()
            return web.json_response(TRUE)

        async def until(event: asyncio.Event, holds: Callable[[], bool]) -> None:
            async with asyncio.timeout(60):
                while not holds():  # looked at anew each time
                    event.clear()
                    await event.wait()

        router = Router(time.monotonic)
        async with stand_in(metadata) as url, watched(router, Found()) as watch:
            await until(looked, lambda: "odd" in watch.problem)
            await until(looked, lambda: not watch.problem)
            await until(polled, lambda: len(router.peers) == 1)
            with monkeypatch.context() as patch:
                patch.setattr(router, "report", Mock(side_effect=fault))
                await until(polled, lambda: not router.peers)
                assert "odd" in watch.seen[url].why
            await until(polled, lambda: len(router.peers) == 1)

    asyncio.run(scenario())
    assert [record.exc_info is not None for record in caplog.records if "odd" in record.message][:1] == [True]


def test_requests_under_way_keep_no_poll_from_its_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """Polls share the requests' connections: a bound on those would take a busy gateway's replicas out."""
    bounds = []

    class Noted(aiohttp.TCPConnector):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            bounds.append((self.limit, self.limit_per_host))

    monkeypatch.setattr(aiohttp, "TCPConnector", Noted)
    with TestClient(create_gateway(Given(()))):
        assert bounds == [(0, 0)]


def test_names_without_an_answer_delay_no_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as asyncio has threads of its own: a lookup takes one until the system gives up."""
    system, answered = socket.getaddrinfo, threading.Event()

    async def scenario() -> None:
        loop, asked = asyncio.get_running_loop(), asyncio.Queue[str]()

        def looked_up(host: str, *args: Any, **options: Any) -> Any:
            if host != "r0":
                loop.call_soon_threadsafe(asked.put_nowait, host)
                answered.wait()
                raise OSError(None, "no answer")
            return system("127.0.0.1", *args, **options)

        monkeypatch.setattr(socket, "getaddrinfo", looked_up)
        names = [f"dead{number}" for number in range(min(32, 4 + (os.cpu_count() or 1)))]
        resolver = Resolver()
        dead = [asyncio.create_task(resolver.resolve(name, 1)) for name in names]
        try:
            async with asyncio.timeout(60):
                for _ in names:
                    await asked.get()
                (found,) = await resolver.resolve("r0", 8001)
            assert (found["hostname"], found["host"], found["port"]) == ("r0", "127.0.0.1", 8001)
            assert not any(one.done() for one in dead)
        finally:
            answered.set()
            await asyncio.gather(*dead, return_exceptions=True)

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
    said: dict[str, Any] = {"answered_at": 9.5, "queue": (3, 5), "loaded": 2, "capacity": 4}
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


@pytest.mark.parametrize(("length", "status"), [(MOST_NAME, 200), (MOST_NAME + 1, 400), (60_000, 400)])
def test_a_view_of_the_fleet_orders_no_name_that_an_adapter_cannot_have(length: int, status: int) -> None:
    """The order takes a hash of the name and each replica: a long name would hold up every request."""
    answer = TestClient(create_gateway(Given(()))).get("/v1/fleet", params={"adapter": "x" * length})
    assert (answer.status_code, answer.json().get("order")) == (status, [] if status == 200 else None)


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [("GET", "/v1/load_lora_adapter", "POST"), ("POST", "/v1/fleet", "GET, HEAD"), ("GET", "/pause", "POST")],
)
def test_another_method_on_the_gateways_own_path(method: str, path: str, allowed: str) -> None:
    """405 with what the path takes: it is passed to no replica."""
    answer = TestClient(create_gateway(Given(()))).request(method, path)
    assert (answer.status_code, answer.headers.get("allow")) == (405, allowed), answer.text
