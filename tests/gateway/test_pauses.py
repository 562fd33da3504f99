"""Pauses of a fleet whose replicas hang, leave and come back: no replica stays paused after a /resume."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from starlette.exceptions import HTTPException
from starlette.requests import Request

from lora_fs.demo.process import free_port
from lora_fs.sidecar.gateway import watch as watching
from lora_fs.sidecar.gateway.broadcast import Broadcast
from lora_fs.sidecar.gateway.calls import asking, pauses
from lora_fs.sidecar.gateway.routing import Router
from lora_fs.sidecar.gateway.watch import Watch
from lora_fs.sidecar.server.middleware.origin import Sites
from tests.gateway.conftest import Stubs, stand_in
from tests.gateway.test_broadcast import Complete, call, owned
from tests.gateway.test_process import ready, started, until

__all__ = ["owned"]

LIMIT_S = 60.0


class Replica:
    """What a sidecar has of pauses.

    While ``is_awake`` is not set it answers nothing, and while ``pauses`` is not set it carries out no pause.
    As in a sidecar, a call goes on when its client has left.
    """

    def __init__(self, name: str, polled: asyncio.Event) -> None:
        self.name, self.url, self._polled = name, f"http://127.0.0.1:{free_port()}", polled
        self.paused, self.calls = set[str](), list[str]()
        self.is_awake, self.pauses, self.was_asked = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.is_awake.set()
        self.pauses.set()
        self.tells, self.refuses = True, False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        port = int(self.url.rpartition(":")[2])
        async with stand_in(self._metadata, port, pause=self._pause, resume=self._resume):
            try:
                yield
            finally:
                self.is_awake.set()
                self.pauses.set()

    async def _metadata(self, _: web.Request) -> web.Response:
        self._polled.set()
        await self.is_awake.wait()
        told: dict[str, Any] = {
            "replica": self.name,
            "ready": True,
            "model": {"name": "tiny"},
            "lora": {"loaded_loras": {}, "lora_capacity": {"available_slots": 2, "loaded_count": 0}},
        }
        return web.json_response(told | ({"paused": sorted(self.paused)} if self.tells else {}))

    async def _pause(self, request: web.Request) -> web.Response:
        self.was_asked.set()
        await self.is_awake.wait()
        await self.pauses.wait()
        if not self.refuses:
            self.paused.add(_key(request))
        return self._said("pause", request)

    async def _resume(self, request: web.Request) -> web.Response:
        await self.is_awake.wait()
        if not self.refuses:
            self.paused -= {_key(request)} if "lora_name" in request.query else set(self.paused)
        return self._said("resume", request)

    def _said(self, call: str, request: web.Request) -> web.Response:
        self.calls.append(f"{call} {_key(request)} {request.headers['authorization']}")
        return web.json_response({"paused": sorted(self.paused)}, status=401 if self.refuses else 200)


def _key(request: web.Request) -> str:
    name = request.query.get("lora_name", "*")
    return name if name == "*" else f"default/{name}"


class Fleet:
    """Two replicas before a gateway's watch and calls. ``found``: the replicas that its discovery lists."""

    def __init__(self) -> None:
        self._polled = asyncio.Event()
        self.replicas = [Replica("r0", self._polled), Replica("r1", self._polled)]
        self.found = {one.url: None for one in self.replicas}
        self.watch = Watch(Router(time.monotonic), self, time.monotonic, headers={})
        self.asking = asking.Asking(self.watch, hold_timeout_s=1.0)
        self.every = Broadcast(self.asking, Sites())

    async def find(self) -> Mapping[str, str | None]:
        return dict(self.found)

    async def call(self, path: str) -> dict[str, Any]:
        path, _, query = path.partition("?")
        headers = [(b"host", b"localhost"), (b"authorization", b"Bearer t")]
        scope = {"type": "http", "method": "POST", "path": path, "query_string": query.encode()}
        act = self.every.pause if path == "/pause" else self.every.resume
        answer = await act(Request({**scope, "headers": headers}))
        told: dict[str, Any] = json.loads(bytes(answer.body))
        return told

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not holds():  # looked at anew at each poll
                self._polled.clear()
                await self._polled.wait()

    async def are_ready(self, *names: str) -> None:
        await self.until(lambda: self.watch.ready == set(names))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the gateway look often, and give up soon."""
    for name, seconds in (("POLL_S", 0.01), ("FIND_S", 0.01), ("ANSWER_S", 0.5)):
        monkeypatch.setattr(watching, name, seconds)
    monkeypatch.setattr(asking, "MARGIN_S", 0.0)


@asynccontextmanager
async def running() -> AsyncIterator[Fleet]:
    fleet = Fleet()
    async with (
        fleet.replicas[0].running(),
        fleet.replicas[1].running(),
        aiohttp.ClientSession() as session,
        fleet.watch.running(session),
    ):
        fleet.asking.session = session
        await fleet.are_ready("r0", "r1")
        yield fleet


@pytest.mark.parametrize("leaves", [False, True], ids=["it hangs", "DNS lists it no more"])
@pytest.mark.parametrize("query", ["", "?lora_name=a1"])
def test_a_replica_that_is_out_at_a_resume_is_resumed_before_it_is_in(query: str, leaves: bool) -> None:
    """With the caller's credentials. The answer names a replica that the gateway knows and did not reach."""

    async def scenario() -> None:
        async with running() as fleet:
            await fleet.call(f"/pause{query}")
            away = fleet.replicas[1]
            away.is_awake.clear()
            if leaves:
                del fleet.found[away.url]
            await fleet.are_ready("r0")
            told = await fleet.call(f"/resume{query}")
            assert [*told["replicas"]] == ["r0"]
            assert away.paused
            fleet.found[away.url] = None
            away.is_awake.set()
            await fleet.are_ready("r0", "r1")
            assert not away.paused
            assert away.calls[1:] == [f"resume {'default/a1' if query else '*'} Bearer t"]
            assert [*told["not_reached"]] == ([] if leaves else ["r1"])

    asyncio.run(scenario())


@pytest.mark.parametrize("tells", [True, False], ids=["", "an older version"])
@pytest.mark.parametrize("query", ["", "?lora_name=a1"])
def test_a_replica_that_hangs_in_a_pause_is_resumed_when_it_wakes(query: str, tells: bool) -> None:
    """Also if it carries the pause out after it took the /resume. The error names it."""

    async def scenario() -> None:
        async with running() as fleet:
            slow = fleet.replicas[1]
            slow.tells = tells
            slow.pauses.clear()
            with pytest.raises(HTTPException, match="the gateway resumes r1 once it answers") as caught:
                await fleet.call(f"/pause{query}")
            assert caught.value.status_code == 504
            assert not fleet.replicas[0].paused
            await fleet.until(lambda: bool(slow.calls))  # the /resume; the /pause is not carried out yet
            slow.pauses.set()
            await fleet.until(lambda: any(one.startswith("pause") for one in slow.calls))
            await fleet.until(lambda: not slow.paused)

    asyncio.run(scenario())


def test_a_newer_pause_by_another_gateway_is_not_undone() -> None:
    """The replicas that took the /resume pause again: so does the one that missed it."""

    async def scenario() -> None:
        async with running() as fleet:
            await fleet.call("/pause")
            away = fleet.replicas[1]
            away.is_awake.clear()
            await fleet.are_ready("r0")
            await fleet.call("/resume")
            fleet.replicas[0].paused.add("*")
            away.is_awake.set()
            await fleet.are_ready("r0", "r1")
            assert away.paused == {"*"}
            assert [one.partition(" ")[0] for one in away.calls] == ["pause"]

    asyncio.run(scenario())


def test_a_newer_pause_by_the_same_gateway_is_not_undone() -> None:
    """The kept /resume is void; the next one reaches both replicas."""

    async def scenario() -> None:
        async with running() as fleet:
            fleet.replicas[0].tells = False
            await fleet.call("/pause")
            away = fleet.replicas[1]
            away.is_awake.clear()
            await fleet.are_ready("r0")
            await fleet.call("/resume")
            await fleet.call("/pause")
            away.is_awake.set()
            await fleet.are_ready("r0", "r1")
            assert away.paused == {"*"}
            told = await fleet.call("/resume")
            assert (sorted(told["replicas"]), told["not_reached"], away.paused) == (["r0", "r1"], {}, set())

    asyncio.run(scenario())


def test_a_resume_that_overtakes_a_pause_wins() -> None:
    """The pause, which one replica has not carried out yet, is undone and says so."""

    async def scenario() -> None:
        async with running() as fleet:
            slow = fleet.replicas[1]
            slow.pauses.clear()
            pausing = asyncio.create_task(fleet.call("/pause"))
            await slow.was_asked.wait()
            await fleet.until(lambda: bool(fleet.replicas[0].paused))
            await fleet.call("/resume")
            slow.pauses.set()
            with pytest.raises(HTTPException, match="a POST /resume came") as caught:
                await pausing
            assert caught.value.status_code == 409
            assert not any(one.paused for one in fleet.replicas)

    asyncio.run(scenario())


def test_a_resume_that_no_replica_accepts_is_not_repeated() -> None:
    """A caller whom no replica knows leaves nothing at the gateway."""

    async def scenario() -> None:
        async with running() as fleet:
            fleet.replicas[0].refuses = True
            away = fleet.replicas[1]
            away.is_awake.clear()
            await fleet.are_ready("r0")
            with pytest.raises(HTTPException, match="answered 401"):
                await fleet.call("/resume")
            away.is_awake.set()
            await fleet.are_ready("r0", "r1")
            assert away.calls == []

    asyncio.run(scenario())


def test_a_kept_resume_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """After its time, and the oldest one if there are too many."""
    monkeypatch.setattr(pauses, "MOST_KEPT", 2)

    async def scenario() -> None:
        async with running() as fleet:
            away = fleet.replicas[1]
            away.is_awake.clear()
            await fleet.are_ready("r0")
            for name in ("a1", "a2", "a3"):
                await fleet.call(f"/resume?lora_name={name}")
            away.is_awake.set()
            await fleet.are_ready("r0", "r1")
            assert [one.split()[1] for one in away.calls] == ["default/a2", "default/a3"]
            monkeypatch.setattr(pauses, "KEEP_S", 0.0)
            away.is_awake.clear()
            await fleet.are_ready("r0")
            await fleet.call("/resume")
            away.is_awake.set()
            await fleet.are_ready("r0", "r1")
            assert len(away.calls) == 2

    asyncio.run(scenario())


def test_a_sidecar_that_hangs_while_the_fleet_resumes_answers_when_it_wakes(
    owned: Stubs, complete: Complete
) -> None:
    """Real sidecars: the one that was stopped has no pause left when the gateway counts it as ready."""
    owned.env["LORA_FS_HOLD_TIMEOUT_S"] = "2"
    owned.add()
    hung = owned.add()
    gateway = started(owned, replicas=2)
    assert call(gateway.url, "/pause").status_code == 200
    with hung.paused():
        until(lambda: ready(gateway) == ["r0"])
        resumed = call(gateway.url, "/resume")
    until(lambda: len(ready(gateway)) == 2)
    assert complete(hung.url, "a1").status_code == 200
    assert (resumed.status_code, resumed.json()["not_reached"].keys()) == (200, {"r1"})
