"""Loads and unloads at a gateway: whom it lets send a body, and when it says that an adapter is gone."""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import json
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import AsyncMock, Mock, patch

import aiohttp
import httpx
import pytest
from aiohttp import web
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import Message

from lora_fs.demo.process import LOCAL, Process
from lora_fs.sidecar.errors import InputError
from lora_fs.sidecar.gateway import broadcast
from lora_fs.sidecar.gateway.broadcast import Broadcast
from lora_fs.sidecar.gateway.calls import asking
from lora_fs.sidecar.gateway.calls.asking import Asking, Call, Said, failed, together
from lora_fs.sidecar.gateway.discovery import Given
from lora_fs.sidecar.gateway.routing import Router
from lora_fs.sidecar.gateway.watch import Watch
from lora_fs.sidecar.server.middleware.answers import ADAPTER, LOAD
from lora_fs.sidecar.server.middleware.origin import Sites
from tests.gateway.conftest import Stubs, stand_in
from tests.gateway.test_broadcast import HEADERS, TOKEN, call, owned
from tests.gateway.test_process import started, until
from tests.gateway.test_watch import TRUE
from tests.registry.conftest import write_adapter

__all__ = ["owned"]

BEGUN = b'{"lora_name": "a1", '


def begun(gateway: Process, path: str, credentials: str) -> socket.socket:
    """A connection on which a call came whose body does not go on."""
    url = httpx.URL(gateway.url)
    connection = socket.create_connection((url.host, url.port or 0), timeout=20)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{credentials}Content-Length: 1000\r\n\r\n"
    connection.sendall(head.encode() + BEGUN)
    return connection


@pytest.mark.parametrize("credentials", ["", "Authorization: Bearer wrong\r\n"], ids=["none", "wrong"])
def test_who_has_no_token_sends_no_body(owned: Stubs, credentials: str) -> None:
    """The replica's 401 comes while the body is still on its way."""
    owned.add()
    gateway = started(owned, replicas=1)
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        with begun(gateway, path, credentials) as connection:
            assert connection.recv(1000).startswith(b"HTTP/1.1 401 ")


def test_a_client_that_leaves_within_its_body_is_no_error(owned: Stubs) -> None:
    """The gateway's log has no error, and the next call is answered."""
    owned.add()
    gateway = started(owned, replicas=1)
    credentials = f"Authorization: Bearer {TOKEN}\r\n"
    begun(gateway, "/v1/unload_lora_adapter", credentials).close()
    assert call(gateway.url, "/v1/unload_lora_adapter", lora_name="a1").status_code == 200
    assert "Traceback" not in gateway.log_text()


@asynccontextmanager
async def calls(
    status: int = 400, headers: dict[str, str] | None = None
) -> AsyncIterator[tuple[Broadcast, list[bytes]]]:
    """A gateway's calls before one replica, which answers every POST alike; and the bodies that it got."""
    bodies: list[bytes] = []
    polled = asyncio.Event()

    async def metadata(_: web.Request) -> web.Response:
        polled.set()
        return web.json_response(TRUE)

    async def post(request: web.Request) -> web.Response:
        bodies.append(await request.read())
        told = {"error": {"message": "a body is missing"}}
        return web.json_response(told, status=status, headers=headers)

    async with stand_in(metadata, all=post) as url, aiohttp.ClientSession() as session:
        watch = Watch(Router(time.monotonic), Given([url]), time.monotonic, headers={})
        asking = Asking(watch, hold_timeout_s=10.0)
        asking.session = session
        async with watch.running(session):
            async with asyncio.timeout(60):
                while not watch.ready:  # looked at anew at each poll
                    polled.clear()
                    await polled.wait()
            yield Broadcast(asking, Sites()), bodies


def request(*messages: Message) -> Request:
    """A load, of which ``messages`` come, and nothing more."""
    left = [*messages]

    async def receive() -> Message:
        if not left:
            await asyncio.Event().wait()
        return left.pop(0)

    head = [(b"host", b"localhost"), (b"authorization", b"Bearer t"), (b"content-type", b"application/json")]
    return Request({"type": "http", "method": "POST", "path": "/", "headers": head}, receive)


def piece(body: bytes) -> Message:
    return {"type": "http.request", "body": body, "more_body": True}


@pytest.mark.parametrize(
    ("number", "status", "stays"), [(errno.EMFILE, 503, True), (errno.ECONNREFUSED, 0, False)]
)
def test_a_gateway_without_files_blames_no_replica_for_a_call(number: int, status: int, stays: bool) -> None:
    """A replica that takes no connection goes out, and one that is not asked stays."""

    class NoConnection(aiohttp.TCPConnector):
        async def connect(self, *_: Any, **__: Any) -> NoReturn:
            raise aiohttp.ClientConnectorError(Mock(), OSError(number, "no"))

    async def scenario() -> None:
        async with calls() as (every, _), aiohttp.ClientSession(connector=NoConnection()) as session:
            asking = every._asking
            asking.session = session
            said = await asking.one("r0", Call("POST", "/pause", {}))
            assert (said.status, "r0" in asking.watch.ready) == (status, stays)
            assert ("retry-after" in said.headers) == stays

    asyncio.run(scenario())


def test_an_answer_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway would keep all of it. The replica may have done the call, as one that does not answer."""
    monkeypatch.setattr(asking, "MOST_BYTES", 1 << 16)

    async def scenario() -> None:
        over = asyncio.Event()

        async def endless(request: web.Request) -> web.StreamResponse:
            answer = web.StreamResponse()
            await answer.prepare(request)
            await answer.write(bytes((1 << 16) + 1))
            await over.wait()
            return answer

        async with stand_in(endless) as url, aiohttp.ClientSession() as session:
            every = Asking(Mock(), hold_timeout_s=10.0)
            every.session = session
            said = await every.at(url, "r0", Call("GET", "/metadata", {}, timeout_s=60))
            over.set()
        assert (said.status, said.has_answered) == (504, False)
        assert said.why == "replica r0 did not answer: over 65536 bytes"

    asyncio.run(scenario())


def test_a_body_that_does_not_go_on_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a completion's is."""
    monkeypatch.setattr(broadcast, "BODY_S", 0.05)

    async def scenario() -> None:
        async with calls() as (every, _):
            for act in (every.load, every.unload):
                async with asyncio.timeout(30):
                    with pytest.raises(InputError, match=r"of the body came|comes too slowly"):
                        await act(request(piece(BEGUN)))

    asyncio.run(scenario())


def test_a_body_that_is_too_large_is_refused() -> None:
    """The error says how large it may be."""

    async def scenario() -> None:
        async with calls() as (every, _):
            with pytest.raises(HTTPException, match="over 1048576 bytes") as caught:
                await every.load(request(piece(bytes(broadcast.MOST_BYTES)), piece(b" ")))
            assert caught.value.status_code == 413

    asyncio.run(scenario())


def test_a_call_is_checked_before_its_body_is_read() -> None:
    """A page of another site and a caller whom the replica does not know send none."""

    async def scenario() -> None:
        async with calls(status=401) as (every, bodies):
            assert (await every.load(request())).status_code == 401
            assert bodies == [b""]
            foreign = request()
            foreign.scope["headers"].append((b"origin", b"http://evil.example"))
            with pytest.raises(HTTPException) as caught:
                await every.load(foreign)
            assert caught.value.status_code == 403
            assert bodies == [b""]

    asyncio.run(scenario())


def test_a_client_that_leaves_ends_its_call() -> None:
    """Without an error; no replica gets the call."""

    async def scenario() -> None:
        async with calls() as (every, bodies):
            await every.load(request(piece(BEGUN), {"type": "http.disconnect"}))
            assert bodies == [b""]

    asyncio.run(scenario())


def test_a_body_goes_to_the_replica_as_it_is() -> None:
    """And so does the replica's answer to the client."""

    async def scenario() -> None:
        async with calls() as (every, bodies):
            body = {"lora_name": "a1", "lora_path": "/x"}
            sent = json.dumps(body).encode()
            answer = await every.load(request({"type": "http.request", "body": sent}))
            assert (answer.status_code, json.loads(bodies[-1])) == (400, body)
            assert b"a body is missing" in bytes(answer.body)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("status", "headers", "wanted", "why"),
    [
        (200, {}, 502, "replica r0 registered something, and did not say what"),
        (200, {ADAPTER: "default/a1"}, 502, "replica r0 registered something, and did not say what"),
        (400, {LOAD: "{}"}, 502, "replica r0 registered something, and did not say what"),
        (400, {ADAPTER: "default/tiny/v1/a1", LOAD: "{"}, 400, "replica r0 did not say what it wrote"),
        (400, {ADAPTER: "default/tiny/v1/a1", LOAD: "[" * 5000}, 400, "replica r0 did not say what it wrote"),
    ],
    ids=["no adapter", "half an adapter", "no adapter of a failure", "no JSON", "a depth without end"],
)
def test_a_replica_that_does_not_say_what_it_wrote_is_named(
    status: int, headers: dict[bytes, str], wanted: int, why: str
) -> None:
    """As a server before the replica that drops headers."""
    given = {name.decode(): value for name, value in headers.items()}

    async def scenario() -> None:
        async with calls(status, given) as (every, _):
            sent = {"type": "http.request", "body": b'{"lora_name": "a1"}'}
            with pytest.raises(HTTPException, match=why) as caught:
                await every.load(request(sent))
            assert caught.value.status_code == wanted

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("failed", "tried"),
    [
        (Said("r0", 0, b"", {}, has_answered=False), 2),
        (Said("r0", 504, b"", {}, has_answered=False), 2),
        (Said("r0", 503, b"the volume is away", {}), 2),
        (Said("r0", 403, b"no", {}), 1),
    ],
    ids=["gone", "hung", "no volume", "refused"],
)
def test_another_replica_undoes_a_load_where_the_first_does_not(failed: Said, tried: int) -> None:
    """They share the registry, and an undo may be repeated. A caller who is refused is refused by each."""
    one = AsyncMock(side_effect=[failed, Said("r1", 200, b"{}", {})])
    every = Broadcast(Mock(one=one), Sites())
    said = asyncio.run(every._undo(["r0", "r1"], "/v1/lora_adapters/default/tiny/a1", "{}", {}))
    assert (one.await_count, said.is_done) == (tried, tried == 2)


@pytest.mark.parametrize(
    "body",
    [
        b"<html>",
        b"[]",
        b"{}",
        b'{"loras": 5}',
        b'{"loras": ["a1"]}',
        b'{"loras": [{}]}',
        b"[" * 100_000,
        b"\xff",
    ],
    ids=lambda body: body[:20].decode(errors="replace"),
)
def test_a_list_that_is_none_may_have_the_adapter(body: bytes) -> None:
    """An unload waits for it, and an error that says such a thing is quoted."""
    assert broadcast._may_have(Said("r0", 200, body, {}), "a1")
    assert Said("r0", 500, body, {}).why.startswith("replica r0 answered 500: ")


ODD = [
    b'{"x": NaN}',
    b'{"x": -Infinity}',
    b'{"x": 1e999}',
    b'{"x": "\\ud800"}',
    b'{"x": 1',
    b"\xff",
    b"[" * 9999,
]


@pytest.mark.parametrize("body", ODD, ids=lambda body: body[:20].decode(errors="replace"))
def test_an_answer_that_json_does_not_have_is_text(body: bytes) -> None:
    """The gateway's own answer quotes it. A configuration of that kind is 502, with the replica's name."""
    said = Said("r1", 200, body, {})
    assert json.loads(bytes(together([said]).body)) == {"replicas": {"r1": body.decode(errors="replace")}}
    with pytest.raises(HTTPException, match="of replica r1's engine is no JSON") as caught:
        broadcast._info(said)
    assert caught.value.status_code == 502


@pytest.mark.parametrize(("status", "told"), [(302, 502), (304, 502), (0, 503), (404, 404)])
def test_a_refusal_is_an_error_whatever_the_replicas_status(status: int, told: int) -> None:
    """A server before the replica may send on, or say that nothing changed. Neither is an answer of ours."""
    assert failed([Said("r1", status, b"", {})], (), "").status_code == told


def test_a_first_replica_that_falls_silent_may_have_done_the_call() -> None:
    """No other one is asked then, and the error says so. Without a connection the next one is asked."""
    why = "replica r0 did not answer: TimeoutError"
    silent, gone = (Said("r0", status, why.encode(), {}, has_answered=False) for status in (504, 0))
    done = Said("r1", 200, b"{}", {})
    every = Asking(Mock(ready={"r0", "r1"}), hold_timeout_s=10.0)
    with patch.object(every, "one", AsyncMock(side_effect=[silent, gone, done])) as one:
        with pytest.raises(HTTPException, match=f"{why}; it may have done the call") as caught:
            asyncio.run(every.first(Call("POST", "/v1/load_lora_adapter", {})))
        assert (caught.value.status_code, one.await_count) == (504, 1)
        assert asyncio.run(every.first(Call("POST", "/v1/load_lora_adapter", {}))) == ("r1", ["r0"], done)


def test_a_list_has_an_adapter_under_its_name_or_a_revisions() -> None:
    """In the caller's namespace, if the call named one. A list that is an error says nothing."""
    loras = [{"lora_id": "a1@v1", "namespace": "team"}, {"lora_id": "team/b", "namespace": "team"}]
    said = Said("r0", 200, json.dumps({"loras": loras}).encode(), {})
    names = {
        "a1": True,
        "a1@v1": True,
        "a1@v2": False,
        "team/a1": True,
        "other/a1": False,
        "b": True,
        "a": False,
    }
    assert {name: broadcast._may_have(said, name) for name in names} == names
    assert broadcast._may_have(replace(said, status=500), "a")


def listed(process: Process) -> set[str]:
    told = httpx.get(f"{process.url}/v1/list_lora_adapters", headers=HEADERS, **LOCAL).json()
    return {one["lora_id"] for one in told["loras"]}


def held(fleet: Stubs, name: str, pool: concurrent.futures.Executor) -> Any:
    """A request for ``name`` that is under way at the second replica until its engine is released."""
    httpx.post(f"{fleet.engines[1]}/hold", **LOCAL).raise_for_status()
    running = pool.submit(call, fleet.sidecars[1].url, "/v1/completions", model=name, prompt="x")
    until(lambda: fleet.counts(1)["under_way"] == 1)
    return running


@pytest.mark.parametrize("name", ["policy", "default/policy", "team/policy"])
def test_an_unload_waits_for_every_replica_whatever_namespace_the_name_has(
    owned: Stubs, tmp_path: Path, name: str
) -> None:
    """Of several namespaces the first one is meant by a name without one."""
    owned.env["LORA_FS_NAMESPACES"] = "default,team"
    owned.add()
    owned.add()
    gateway = started(owned, replicas=2)
    full = name if "/" in name else f"default/{name}"
    for number, one in enumerate(["default/policy", "team/policy"]):
        source = write_adapter(tmp_path / "published" / str(number), seed=number)
        loaded = call(gateway.url, "/v1/load_lora_adapter", lora_name=one, lora_path=str(source))
        assert loaded.status_code == 200, loaded.text
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        running = held(owned, full, pool)
        unloading = pool.submit(call, gateway.url, "/v1/unload_lora_adapter", lora_name=name)
        until(lambda: full not in listed(owned.sidecars[0]))
        done, _ = concurrent.futures.wait([unloading], timeout=1)
        assert not done
        httpx.post(f"{owned.engines[1]}/release", **LOCAL).raise_for_status()
        assert running.result().status_code == 200
        assert unloading.result().status_code == 200, unloading.result().text
    assert full not in listed(owned.sidecars[1])
    assert {"default/policy", "team/policy"} - {full} <= listed(owned.sidecars[1])


@pytest.mark.parametrize("reads", [True, False], ids=["the gateway may read", "nobody may read"])
def test_an_unload_by_a_token_that_may_not_read(owned: Stubs, tmp_path: Path, reads: bool) -> None:
    """The gateway looks with its own token. Without one it says that it does not know: 202."""
    unregisters = "unregisters-" + "u" * 40
    tokens, own = Path(owned.env["LORA_FS_TOKEN_FILE"]), tmp_path / "own"
    tokens.write_text(f"{TOKEN}\n{unregisters} name=u verbs=unregister\n")
    own.write_text(TOKEN)
    own.chmod(0o600)
    owned.env["LORA_FS_PUBLIC_NAMESPACES"] = "-"
    owned.add()
    owned.add()
    given = {"LORA_FS_CLIENT_TOKEN_FILE": str(own)} if reads else {}
    gateway = started(owned, replicas=2, **given)
    source = write_adapter(tmp_path / "published" / "policy")
    path = "/v1/load_lora_adapter"
    assert call(gateway.url, path, lora_name="policy", lora_path=str(source)).status_code == 200
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        running = held(owned, "policy", pool)
        headers = {"Authorization": f"Bearer {unregisters}"}
        unloading = pool.submit(
            call, gateway.url, "/v1/unload_lora_adapter", headers=headers, lora_name="policy"
        )
        until(lambda: "policy" not in listed(owned.sidecars[0]))
        if reads:
            done, _ = concurrent.futures.wait([unloading], timeout=1)
            assert not done
        else:
            assert unloading.result().status_code == 202
            assert "so r1 may hold it" in unloading.result().text
        httpx.post(f"{owned.engines[1]}/release", **LOCAL).raise_for_status()
        assert running.result().status_code == 200
        assert unloading.result().is_success
