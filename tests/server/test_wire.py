"""What the sidecar does on the wire, with bytes on raw sockets and an engine behind it."""

from __future__ import annotations

import asyncio
import json
import socket
import socketserver
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import httpx
import openai
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from lora_fs.demo.process import LOCAL
from lora_fs.sidecar.gateway.app import create_gateway
from lora_fs.sidecar.gateway.discovery import Given
from lora_fs.sidecar.reconcile.catalog import Served
from lora_fs.sidecar.server.app import create_app
from lora_fs.sidecar.server.connection import BoundedConnection
from lora_fs.sidecar.server.middleware.access import Admin
from lora_fs.sidecar.server.proxy import upstream
from lora_fs.sidecar.server.proxy.upstream import Upstream, lost_the_adapter
from lora_fs.sidecar.settings import ENGINE_IDLE_TIMEOUT_S
from tests.reconcile.test_plan import RECORD
from tests.server.conftest import FakeEngine, FakeReplica, serving, until

BODY = json.dumps({"model": "a1", "prompt": "x"}).encode()
PATIENCE_S = 60.0


@contextmanager
def sidecar(
    replica: FakeReplica, engine_url: str, *, send_timeout_s: float = 60.0, **options: Any
) -> Iterator[str]:
    """A sidecar in front of the engine; yields its URL."""
    app = create_app(replica, engine_url=engine_url, admin=Admin(None), **options)
    with serving(app, send_timeout_s=send_timeout_s) as url:
        yield url


def ask(url: str, request: bytes) -> tuple[bytes, bytes]:
    """Send bytes; returns the head and the rest of what comes until the server closes."""
    parts = urlsplit(url)
    with closing(socket.create_connection((parts.hostname, parts.port), timeout=PATIENCE_S)) as sock:
        sock.sendall(request)
        data = b""
        while more := sock.recv(65536):
            data += more
    head, _, rest = data.partition(b"\r\n\r\n")
    return head, rest


def test_a_request_asks_whether_the_engines_host_is_still_there() -> None:
    """A host without power closes no connection, and its requests would wait an hour."""

    async def scenario() -> None:
        over = asyncio.Event()

        async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n")
            await reader.read()
            writer.close()
            over.set()

        async with await asyncio.start_server(answered, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            async with upstream.connected(Upstream()) as session:
                answer = await session.get(f"http://127.0.0.1:{port}/")
                assert answer.connection is not None
                assert answer.connection.transport is not None
                sock = answer.connection.transport.get_extra_info("socket")
                assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                waits = [
                    sock.getsockopt(socket.IPPROTO_TCP, one)
                    for one in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
                ]
                assert waits[0] + waits[1] * waits[2] <= 25
                answer.close()
                await over.wait()

    asyncio.run(scenario())


@pytest.mark.parametrize(("method", "times"), [("DELETE", 1), ("PUT", 1), ("POST", 1), ("GET", 2)])
def test_a_change_that_breaks_off_is_sent_once(method: str, times: int) -> None:
    """It may have run: the second DELETE would be answered 404. A GET may be repeated."""

    async def scenario() -> None:
        heads: list[bytes] = []

        async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with closing(writer):
                while (head := await reader.readuntil(b"\r\n\r\n")).startswith(b"GET /first"):
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
                heads.append(head)

        async with await asyncio.start_server(answered, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            async with upstream.connected(Upstream()) as session:
                async with session.get(f"{url}/first"):
                    pass
                with pytest.raises(aiohttp.ClientConnectionError):
                    await session.request(method, f"{url}/")
        assert [head.split()[0].decode() for head in heads] == [method] * times

    asyncio.run(scenario())


@pytest.mark.parametrize("status", [b"101 Switching Protocols", b"099 Low", b"600 High"])
def test_a_status_that_no_answer_has_is_the_engines_fault(replica: FakeReplica, status: bytes) -> None:
    """A client that offered no upgrade would take what follows a 101 for another protocol's bytes."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 %b\r\nContent-Length: 2\r\n\r\n{}" % status)

        engine = threading.Thread(target=answer)
        engine.start()
        with sidecar(replica, f"http://127.0.0.1:{server.getsockname()[1]}") as url:
            answered = httpx.post(f"{url}/v1/completions", content=BODY, **LOCAL)
        engine.join()
    assert answered.status_code == 503
    assert f"status is {int(status[:3])}" in answered.json()["error"]["message"]


@pytest.mark.parametrize("status", [204, 304])
@pytest.mark.parametrize("through_a_gateway", [False, True])
def test_an_answer_without_a_body_has_no_length(
    replica: FakeReplica, caplog: pytest.LogCaptureFixture, status: int, through_a_gateway: bool
) -> None:
    """Where the engine sends one (RFC 9110, 8.6), the connection goes on, and no error is logged."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while head := b"".join(iter(self.rfile.readline, b"\r\n")):
                self.rfile.read(len(BODY) if head.startswith(b"POST") else 0)
                self.wfile.write(b"HTTP/1.1 %d X\r\nETag: x\r\nContent-Length: 10\r\n\r\n" % status)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True

    with ExitStack() as opened:
        engine = opened.enter_context(Server(("127.0.0.1", 0), Handler))
        threading.Thread(target=engine.serve_forever, args=(0.01,), daemon=True).start()
        opened.callback(engine.shutdown)
        url = opened.enter_context(sidecar(replica, f"http://127.0.0.1:{engine.server_address[1]}"))
        if through_a_gateway:
            url = opened.enter_context(serving(create_gateway(Given([url]))))
            until(lambda: httpx.get(f"{url}/health", **LOCAL).status_code == 200, "the gateway is ready")
        with httpx.Client(base_url=url, **LOCAL) as client:
            for method in ("GET", "POST", "HEAD"):
                sent = BODY if method == "POST" else None
                told = client.request(method, "/v1/x", content=sent)
                assert (told.status_code, told.headers["etag"]) == (status, "x")
    assert not [one for one in caplog.records if one.exc_info]


def post(
    path: bytes = b"/v1/completions", *lines: bytes, version: bytes = b"1.1", body: bytes = BODY
) -> bytes:
    """A request that closes its connection."""
    head = b"POST %b HTTP/%b" % (path, version)
    given = b"\r\n".join([head, *lines, b"Content-Type: application/json", b"Content-Length: %d" % len(body)])
    return given + b"\r\n\r\n" + body


@pytest.fixture
def url(replica: FakeReplica, engine_url: str) -> Iterator[str]:
    with sidecar(replica, engine_url) as found:
        yield found


class Torrent:
    """An engine that streams without end. ``held``: how often the adapter was held when it was asked."""

    def __init__(self, replica: FakeReplica) -> None:
        self.replica, self.held = replica, 0
        self.app = Starlette(routes=[Route("/v1/completions", self.answer, methods=["POST"])])

    async def answer(self, request: Request) -> Response:
        self.held = self.replica.holds["a1"]

        async def chunks() -> AsyncIterator[bytes]:
            while True:
                yield b"data: " + b"x" * 65536 + b"\n\n"
                await asyncio.sleep(0)  # else nobody learns that the client left, and it spins for ever

        return StreamingResponse(chunks(), media_type="text/event-stream")


def test_a_client_that_stops_reading_lets_its_adapter_go(replica: FakeReplica) -> None:
    """After the send timeout its connection is cut off, and the adapter has no request any more."""
    torrent = Torrent(replica)
    with (
        serving(torrent.app) as engine_url,
        sidecar(replica, engine_url, send_timeout_s=0.5) as url,
    ):
        parts = urlsplit(url)
        with closing(socket.create_connection((parts.hostname, parts.port), timeout=PATIENCE_S)) as sock:
            sock.sendall(post(b"/v1/completions", b"Host: x"))
            assert sock.recv(1000).startswith(b"HTTP/1.1 200 ")
            until(lambda: replica.holds["a1"] == 0, "the adapter is let go")
    assert torrent.held == 1


def test_a_client_that_reads_slowly_is_not_cut_off(
    replica: FakeReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time that it reads anything the send timeout begins anew.

    A look that finds a client that had no processor meanwhile is of no slow reader: it does not count.
    """
    read, looks, look = 0, 0, BoundedConnection._look

    def look_at_a_reader(connection: BoundedConnection) -> None:
        nonlocal read, looks
        if read < 4:
            connection._watch_client()
        else:
            looks += 1
            look(connection)
        read = 0

    monkeypatch.setattr(BoundedConnection, "_look", look_at_a_reader)
    with (
        serving(Torrent(replica).app) as engine_url,
        sidecar(replica, engine_url, send_timeout_s=0.5) as url,
        closing(socket.socket()) as sock,
    ):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 10)
        sock.settimeout(PATIENCE_S)
        parts = urlsplit(url)
        sock.connect((parts.hostname, parts.port))
        sock.sendall(post(b"/v1/completions", b"Host: x"))
        while looks < 4:
            assert sock.recv(8 << 10)
            read += 1
            time.sleep(0.05)
        assert replica.holds["a1"] == 1


def test_an_engine_whose_answer_does_not_begin(replica: FakeReplica) -> None:
    """After the idle timeout it is 503, with the setting's name."""

    async def never(request: Request) -> Response:
        await request.body()
        await request.receive()  # until the sidecar leaves
        return Response()

    app = Starlette(routes=[Route("/v1/completions", never, methods=["POST"])])
    with (
        serving(app) as engine_url,
        sidecar(replica, engine_url, upstream=Upstream(idle_timeout_s=0.3)) as url,
    ):
        answer = httpx.post(f"{url}/v1/completions", json={"model": "a1"}, timeout=PATIENCE_S)
        assert answer.status_code == 503
        assert "LORA_FS_ENGINE_IDLE_TIMEOUT_S" in answer.json()["error"]["message"]


def test_the_idle_timeout_is_longer_than_clients_wait() -> None:
    """An answer that is not streamed is the client's to give up: by default the sidecar waits longer than
    OpenAI's client does."""
    default_s = openai.DEFAULT_TIMEOUT.read
    assert default_s is not None
    assert Upstream().idle_timeout_s == ENGINE_IDLE_TIMEOUT_S >= 6 * default_s


def test_an_upgrade_is_declined_and_the_body_kept(url: str, engine: FakeEngine) -> None:
    """The JDK's client offers h2c with its first POST: the engine gets the body all the same."""
    lines = (
        b"Host: x",
        b"Connection: Upgrade, HTTP2-Settings, close",
        b"Upgrade: h2c",
        b"HTTP2-Settings: AAA",
    )
    head, _ = ask(url, post(b"/v1/completions", *lines))
    assert head.startswith(b"HTTP/1.1 200 ")
    assert engine.bodies == [json.loads(BODY)]
    assert not {"upgrade", "http2-settings"} & engine.headers[0].keys()


def test_http_1_0_is_answered_without_chunks(url: str, engine: FakeEngine) -> None:
    """A stream ends with its connection."""
    engine.go.set()
    body = json.dumps({"model": "a1", "stream": True}).encode()
    head, rest = ask(url, post(b"/v1/completions", b"Host: x", version=b"1.0", body=body))
    assert b"transfer-encoding" not in head.lower()
    assert rest == b"data: one\n\ndata: [DONE]\n\n"


@pytest.mark.parametrize("request_", [b"GET /health HTTP/1.1\r\n\r\n", b"GET /health\r\n\r\n"])
def test_a_request_without_host_or_version_is_refused(url: str, request_: bytes) -> None:
    """The error has the API's shape, and says what is wrong."""
    head, rest = ask(url, request_)
    assert head.startswith(b"HTTP/1.1 400 ")
    assert "HTTP/1.1" in json.loads(rest)["error"]["message"]


def test_what_connection_names_goes_no_further(replica: FakeReplica) -> None:
    """Neither way. Proxy-Connection is dropped, Via and X-Forwarded-* are appended."""
    seen: list[list[tuple[bytes, bytes]]] = []

    async def answer(request: Request) -> Response:
        seen.append(request.scope["headers"])
        headers = {"Connection": "X-Engine-Hop", "X-Engine-Hop": "1", "Proxy-Connection": "x", "X-Kept": "1"}
        headers["Access-Control-Allow-Origin"] = "*"
        return JSONResponse({}, headers=headers)

    app = Starlette(routes=[Route("/v1/completions", answer, methods=["POST"])])
    with serving(app) as engine_url, sidecar(replica, engine_url) as url:
        lines = (
            b"Host: api.example",
            b"Connection: X-Hop, close",
            b"X-Hop: 1",
            b"Proxy-Connection: keep-alive",
            b"X-Forwarded-For: 192.0.2.7",
            b"Via: 1.0 edge",
        )
        head, _ = ask(url, post(b"/v1/completions", *lines))
    sent = dict(seen[0])
    assert not {b"x-hop", b"proxy-connection"} & sent.keys()
    assert sent[b"x-forwarded-for"] == b"192.0.2.7, 127.0.0.1"
    assert sent[b"via"] == b"1.0 edge, 1.1 lora-fs"
    assert (sent[b"x-forwarded-host"], sent[b"x-forwarded-proto"]) == (b"api.example", b"http")
    names = {line.partition(b":")[0].lower() for line in head.split(b"\r\n")[1:]}
    assert b"x-kept" in names
    assert not {b"x-engine-hop", b"proxy-connection", b"access-control-allow-origin"} & names


def test_an_engines_cookie_is_its_clients(replica: FakeReplica) -> None:
    """It is passed on to the client that it was set for, and sent with no other's request."""
    seen: list[str | None] = []

    async def answer(request: Request) -> Response:
        seen.append(request.headers.get("cookie"))
        return JSONResponse({}, headers={"Set-Cookie": "who=first"})

    app = Starlette(routes=[Route("/v1/completions", answer, methods=["POST"])])
    with serving(app) as engine_url, sidecar(replica, engine_url.replace("127.0.0.1", "localhost")) as url:
        answers = [httpx.post(f"{url}/v1/completions", json={"model": "a1"}, **LOCAL) for _ in range(2)]
    assert [one.headers["set-cookie"] for one in answers] == ["who=first"] * 2
    assert seen == [None, None]


def test_connections_to_the_engine_are_bounded(
    replica: FakeReplica, engine: FakeEngine, engine_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request beyond them waits, bounded, and gets 503 with the setting's name."""
    monkeypatch.setattr(upstream, "CONNECT_S", 0.3)
    with sidecar(replica, engine_url, upstream=Upstream(connections=1)) as url:
        body = {"model": "a1", "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE_S) as first:
            answer = httpx.post(f"{url}/v1/completions", json={"model": "a1"}, timeout=PATIENCE_S)
            assert answer.status_code == 503
            assert "LORA_FS_ENGINE_CONNECTIONS" in answer.json()["error"]["message"]
            engine.go.set()
            assert b"[DONE]" in b"".join(first.iter_bytes())
        assert httpx.post(f"{url}/v1/completions", json={"model": "a1"}, **LOCAL).status_code == 200


def test_an_engine_that_goes_silent_has_a_deadline(replica: FakeReplica, engine_url: str) -> None:
    """A stream whose engine sends nothing for the idle timeout is cut off, and its adapter let go."""
    with sidecar(replica, engine_url, upstream=Upstream(idle_timeout_s=0.3)) as url:
        body = {"model": "a1", "stream": True}
        with (
            pytest.raises(httpx.RemoteProtocolError),
            httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE_S) as answer,
        ):
            b"".join(answer.iter_bytes())
        assert replica.holds["a1"] == 0


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("POST", "/v1/models", "GET, HEAD"),
        ("PUT", "/v1/lora_adapters", "GET, HEAD, POST"),
        ("GET", "/v1/load_lora_adapter", "POST"),
        ("DELETE", "/health", "GET, HEAD"),
        ("PATCH", "/v1/loras/a1", "DELETE"),
        ("POST", "/", "GET, HEAD"),
    ],
)
def test_another_method_on_a_path_of_ours(
    url: str, engine: FakeEngine, method: str, path: str, allow: str
) -> None:
    """It is 405 with every method of the path, and the engine hears nothing of it."""
    answer = httpx.request(method, url + path, **LOCAL)
    assert (answer.status_code, answer.headers["allow"]) == (405, allow)
    assert answer.json()["error"]["code"] == 405
    assert engine.paths == []


@pytest.mark.parametrize("path", ["/", "/health", "/readyz", "/metrics", "/v1/models", "/v1/models/a1"])
def test_head_is_get_without_a_body(url: str, path: str) -> None:
    """Load balancers and link checkers send it."""
    answer = httpx.head(url + path)
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["content-type"] == httpx.get(url + path, **LOCAL).headers["content-type"]


def test_a_websocket_is_refused_with_the_reason(url: str, engine: FakeEngine) -> None:
    """The client learns where it can connect instead."""
    request = (
        b"GET /v1/realtime HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
    parts = urlsplit(url)
    with closing(socket.create_connection((parts.hostname, parts.port), timeout=PATIENCE_S)) as sock:
        sock.sendall(request)
        data = sock.recv(65536)
        while b"}" not in data:
            data += sock.recv(65536)
    assert data.startswith(b"HTTP/1.1 501 ")
    assert b"the engine's own port" in data
    assert engine.paths == []


PREFLIGHT = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}


def test_cors_is_off_unless_it_is_set(url: str, engine: FakeEngine) -> None:
    """A preflight is refused here: what the engine allows is not for the sidecar's callers."""
    answer = httpx.options(f"{url}/v1/completions", headers=PREFLIGHT)
    assert answer.status_code == 405
    assert "access-control-allow-origin" not in answer.headers
    assert engine.paths == []


def test_cors_covers_all_routes_and_errors(replica: FakeReplica, engine_url: str, engine: FakeEngine) -> None:
    """Preflights are answered here; own routes, proxied ones and errors may be read by the origin alone."""
    origin = "https://app.example"
    with sidecar(replica, engine_url, cors_origins=(origin,)) as url:
        for path in ("/v1/completions", "/v1/load_lora_adapter"):
            answer = httpx.options(url + path, headers=PREFLIGHT)
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, origin)
        assert engine.paths == []
        calls = [("GET", "/v1/models", None), ("POST", "/v1/completions", {"model": "a1"})]
        for method, path, body in [
            *calls,
            ("POST", "/v1/completions", {"model": "none"}),
            ("PUT", "/v1/models", {}),
        ]:
            answer = httpx.request(method, url + path, json=body, headers={"Origin": origin}, **LOCAL)
            assert answer.headers["access-control-allow-origin"] == origin, (method, path)
            other = httpx.request(
                method, url + path, json=body, headers={"Origin": "https://evil.example"}, **LOCAL
            )
            assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize(
    ("lost", "error"),
    [
        (True, {"message": "The model `a1` does not exist.", "type": "NotFoundError", "param": "model"}),
        (True, {"message": "LoRA adapter 'a1' is not loaded", "type": "NotFoundError", "param": None}),
        (True, {"message": "no such model", "type": "NotFoundError", "param": "model"}),
        (True, {"message": "The model `a1` does not exist.", "type": "not_found_error"}),
        (False, {"message": "Response with id 'a1' not found.", "type": "invalid_request_error"}),
        (False, {"message": "The model `a11` does not exist.", "type": "NotFoundError"}),
        (False, {"message": "Response with id 'x' not found.", "type": "NotFoundError", "param": "id"}),
    ],
)
def test_the_engine_lost_the_adapter(lost: bool, error: dict[str, Any]) -> None:
    """It is known by the error's type and what it names, in whatever sentence."""
    assert lost_the_adapter(json.dumps({"error": error}).encode(), "a1") is lost


@pytest.mark.parametrize("said", [b"", b"{", b"[]", b'{"detail":"Not Found"}', b'{"error":"gone"}'])
def test_another_404_is_passed_on(said: bytes) -> None:
    """What is no such error is the client's to read."""
    assert not lost_the_adapter(said, "a1")


class Moving(FakeReplica):
    """Its name serves v2 as soon as the engine lost v1."""

    def forget(self, engine_name: str) -> None:
        super().forget(engine_name)
        self.revision = "v2"

    revision = "v1"

    def lookup(self, name: str) -> Served | None:
        if name not in self.names:
            return None
        return Served(name, RECORD.model_copy(update={"revision": self.revision}))


def test_after_a_retry_the_header_names_what_answered(engine: FakeEngine, engine_url: str) -> None:
    """The name may have come to serve another revision meanwhile."""
    replica = Moving()
    engine.missing.add("a1")
    forget = replica.forget

    def found_again(engine_name: str) -> None:
        engine.missing.clear()
        forget(engine_name)

    replica.forget = found_again  # type: ignore[method-assign]
    with sidecar(replica, engine_url) as url:
        answer = httpx.post(f"{url}/v1/completions", json={"model": "a1"}, **LOCAL)
    assert (answer.status_code, answer.headers["x-lora-fs-revision"]) == (200, "v2")
