"""What a connection may send before a request has a body: bounded in bytes and in time."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from lora_fs.sidecar.server import connection
from lora_fs.sidecar.server.connection import HEAD_BYTES, TURN_BYTES, BoundedConnection, configured
from lora_fs.sidecar.server.middleware.body_limit import UNREAD
from lora_fs.sidecar.server.turns import MOST
from tests.server.conftest import serving

LINE = b"GET / HTTP/1.1\r\nHost: x\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
MOST_SENT = 32 << 20


async def told(request: Request) -> PlainTextResponse:
    return PlainTextResponse(f"{len(request.headers)} {len(await request.body())}")


class Wire(asyncio.Transport):
    """What is sent is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.sent, self._closing, self.reads = b"", False, True
        self.writes = 0

    def write(self, data: Any) -> None:
        self.sent += bytes(data)
        self.writes += 1

    def close(self) -> None:
        self._closing = True

    def is_closing(self) -> bool:
        return self._closing

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True


class Kept(logging.Handler):
    """What is logged is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def connection_to(config: Any, wire: Wire, loop: asyncio.AbstractEventLoop) -> BoundedConnection:
    """A server's connection, made by ``wire``'s client."""
    made = config.http_protocol_class(config=config, server_state=ServerState(), app_state={}, _loop=loop)
    assert isinstance(made, BoundedConnection)
    made.connection_made(wire)
    return made


@contextmanager
def wired(app: Any) -> Iterator[tuple[BoundedConnection, Wire, asyncio.AbstractEventLoop]]:
    """A connection to ``app`` whose loop runs when the test says so."""
    config = configured(app)
    config.load()
    loop = asyncio.new_event_loop()
    with closing(loop):
        wire = Wire()
        protocol = connection_to(config, wire, loop)
        yield protocol, wire, loop
        protocol.connection_lost(None)
        while asyncio.all_tasks(loop):
            loop.run_until_complete(turn())


async def turn() -> None:
    """One turn of the loop."""
    await asyncio.sleep(0)


@pytest.fixture(scope="module")
def address() -> Iterator[tuple[str, int]]:
    """A server that says how many headers and bytes it was sent."""
    with serving(Starlette(routes=[Route("/", told, methods=["GET", "POST"])])) as url:
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        yield parts.hostname, parts.port


@contextmanager
def connected(address: tuple[str, int]) -> Iterator[socket.socket]:
    with closing(socket.create_connection(address, timeout=30)) as sock:
        yield sock


def answered(sock: socket.socket) -> tuple[int, bytes]:
    """An answer to its end, and the connection's."""
    data = b""
    try:
        while more := sock.recv(65536):
            data += more
    except ConnectionResetError:
        pass  # what was sent besides was not read
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split()[1]) if head else 0, body


def flood(sock: socket.socket, piece: bytes) -> int:
    """Send it again and again until nobody reads; how much was sent."""
    sent = 0
    try:
        while sent < MOST_SENT:
            sock.sendall(piece)
            sent += len(piece)
    except (BrokenPipeError, ConnectionResetError):
        pass
    return sent


@pytest.mark.parametrize(
    ("begin", "piece"),
    [
        (LINE + b"X: ", b"x" * 4096),
        (LINE, b"X: a\r\n" * 1024),
        (b"GET /", b"x" * 4096),
        (b"", b"\r\n" * 2048),
        (CHUNKED + b"1\r\na\r\n0\r\n", b"X: a\r\n" * 1024),
        (CHUNKED + b"1;", b"x" * 4096),
    ],
    ids=["value", "headers", "path", "blank lines", "trailers", "extension"],
)
def test_without_end(address: tuple[str, int], begin: bytes, piece: bytes) -> None:
    """Nobody reads on."""
    with connected(address) as sock:
        sock.sendall(begin)
        assert flood(sock, piece) < MOST_SENT


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("over", [0, 1])
def test_one_that_is_over_the_bound(over: int, at_once: bool) -> None:
    """Its client is told; what is behind it is not read."""
    with wired(Starlette()) as (protocol, wire, loop):
        pieces = [LINE, b"X: ", b"x" * (HEAD_BYTES - len(LINE) - 3 + over)]
        if at_once:  # and with its end, which lies in a later turn than the bound
            pieces = [b"".join(pieces) + (b"x" * TURN_BYTES + b"\r\n\r\n") * over]
        for piece in pieces:
            protocol.data_received(piece)
            while protocol.flow.is_behind and not wire.is_closing():
                loop.run_until_complete(turn())
        assert wire.is_closing() == bool(over)
        head, _, body = wire.sent.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431 ") == bool(over)
    assert not over or json.loads(body)["error"]["code"] == 431


def test_many_small_chunks_are_parsed_in_turns() -> None:
    """One read of chunks of a byte took h11 335 ms, in which the loop did nothing else. Meanwhile nothing
    more is read, whatever the application takes."""
    taken: list[bytes] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (message := await receive())["type"] == "http.request":
            taken.append(message["body"])

    count = (256 << 10) // 6
    with wired(app) as (protocol, wire, loop):
        protocol.data_received(CHUNKED)
        protocol.data_received(b"1\r\na\r\n" * count)
        assert 0 < len(protocol.cycle.body) <= TURN_BYTES // 5
        turns = 0
        while protocol.flow.is_behind:
            assert not wire.reads
            loop.run_until_complete(turn())
            turns += 1
        assert turns > 1
        assert wire.reads
        while protocol.cycle.body:
            loop.run_until_complete(turn())
    assert len(b"".join(taken)) == count


def test_many_long_bodies_share_a_turn() -> None:
    """However many clients send long bodies at once, a turn of the loop parses few pieces. 500 such clients
    kept a first request beside them waiting for 2.2 s."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["type"] == "http.request":
            pass

    config, count = configured(app), 100
    config.load()
    loop = asyncio.new_event_loop()

    def fed(connections: list[BoundedConnection]) -> int:
        return sum(len(one._unparsed) for one in connections)

    with closing(loop):
        connections = [connection_to(config, Wire(), loop) for _ in range(count)]
        for one in connections:
            one.data_received(LINE.replace(b"GET", b"POST") + b"Content-Length: %d\r\n\r\n" % (1 << 20))
            one.data_received(b"x" * (4 * TURN_BYTES))
            assert one.scope["extensions"] == {UNREAD: {"bytes": one._unread}}
            assert one._unread() == 4 * TURN_BYTES
        left, most, turns = fed(connections), 0, 0
        while left:
            loop.call_soon(loop.stop)
            loop.run_forever()  # one turn
            parsed, left = left - fed(connections), fed(connections)
            most, turns = max(most, parsed), turns + 1
            assert turns < 10 * count
        while any(one.cycle.body for one in connections):
            loop.run_until_complete(turn())
        for one in connections:
            assert one._unread() == 0
            one.connection_lost(None)
        while asyncio.all_tasks(loop):
            loop.run_until_complete(turn())
    assert most <= MOST * TURN_BYTES


def test_an_answer_is_written_at_once() -> None:
    """Its head and its body are one write, which wakes the client once. What comes later is another."""
    more = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        await more.wait()
        await send({"type": "http.response.body", "body": b"second"})

    with wired(app) as (protocol, wire, loop):
        protocol.data_received(LINE + b"\r\n")
        while not wire.writes:
            loop.run_until_complete(turn())
        assert wire.sent.startswith(b"HTTP/1.1 200 ")
        assert wire.sent.endswith(b"first\r\n")
        more.set()
        while wire.writes == 1:
            loop.run_until_complete(turn())
        assert wire.sent.endswith(b"second\r\n0\r\n\r\n")
        assert wire.writes == 2


def test_a_stream_begins_before_its_first_event() -> None:
    """A head whose body does not come in the same turn of the loop is sent by itself."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await asyncio.Event().wait()

    with wired(app) as (protocol, wire, loop):
        protocol.data_received(LINE + b"\r\n")
        while not wire.writes:
            loop.run_until_complete(turn())
        assert wire.sent.startswith(b"HTTP/1.1 200 ")
        assert wire.sent.endswith(b"\r\n\r\n")
        (task,) = protocol.tasks
        task.cancel()


def test_a_head_whose_client_left_is_not_written() -> None:
    """The transport is closed by then: to uvloop's a write is an error, which the loop would log."""
    errors: list[dict[str, Any]] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        wire.close()

    with wired(app) as (protocol, wire, loop):
        loop.set_exception_handler(lambda _, told: errors.append(told))
        protocol.data_received(LINE + b"\r\n")
        while protocol.tasks:
            loop.run_until_complete(turn())
        loop.run_until_complete(turn())
        assert not wire.writes
    assert not errors


def test_a_client_that_leaves_ends_its_request_before_another_one() -> None:
    """The request that is being answered learns it, although the client sent one more."""
    left: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        left.append((await receive())["type"])

    with wired(app) as (protocol, _, loop):
        protocol.data_received((LINE + b"\r\n") * 2)
        assert len(protocol.pipeline) == 1
        for _ in range(3):
            loop.run_until_complete(turn())
        protocol.connection_lost(ConnectionResetError())
        for _ in range(3):
            loop.run_until_complete(turn())
        for task in protocol.tasks:
            task.cancel()
    assert left == ["http.disconnect"]


@pytest.mark.parametrize(
    ("line", "status"), [(b"POST / HTTP/1.0\r\n", 200), (LINE.replace(b"GET", b"POST"), 100)]
)
def test_http_1_0_knows_no_100_continue(address: tuple[str, int], line: bytes, status: int) -> None:
    """Its client would take that for the answer (RFC 9110, 10.1.1). It needs no Host."""
    with connected(address) as sock:
        sock.sendall(line + b"Connection: close\r\nExpect: 100-continue\r\nContent-Length: 1\r\n\r\na")
        assert answered(sock)[0] == status


def test_one_request_waits_for_an_answer_and_the_rest_is_not_parsed() -> None:
    """However many a client sends, it has no more than that in memory."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.Event().wait()

    with wired(app) as (protocol, wire, loop):
        for _ in range(4):
            protocol.data_received(LINE + b"\r\n")
        assert len(protocol.pipeline) == 1
        assert not wire.reads
        loop.run_until_complete(turn())
        for task in protocol.tasks:
            task.cancel()


def test_a_client_that_left_is_not_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written to a connection that is gone."""
    monkeypatch.setattr(connection, "HEAD_S", 0.0)
    with wired(Starlette()) as (protocol, wire, loop):
        protocol.connection_lost(None)
        for _ in range(2):
            loop.run_until_complete(turn())
        assert not wire.sent


def test_an_answer_that_is_closed_is_whole(address: tuple[str, int]) -> None:
    """What was written and not sent is sent before the connection ends."""
    with connected(address) as sock:
        sock.sendall(LINE + b"Connection: close\r\n\r\n")
        assert answered(sock) == (200, b"2 0")


def test_a_large_answer_waits_for_its_client() -> None:
    """An answer of many parts, made without a pause, does not pile up: the transport has all but 64 KiB."""
    part, count, left = b"x" * (1 << 14), 20, []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for number in range(1, count + 1):
            await send({"type": "http.response.body", "body": part, "more_body": True})
            left.append(number * len(part) - len(wire.sent))

    with wired(app) as (protocol, wire, loop):
        protocol.data_received(LINE + b"\r\n")
        while len(left) < count:
            loop.run_until_complete(turn())
    assert max(left) <= 1 << 16


@pytest.mark.parametrize(
    "invalid",
    [
        b"x\r\n\r\n",
        b"GET http://[ HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        LINE.replace(b"1.1", b"2.0") + b"\r\n",
        b"\x16\x03\x01\x02",
    ],
    ids=["no request", "no URL", "no host", "another version", "TLS"],
)
def test_invalid_requests_write_no_log(invalid: bytes) -> None:
    """Each is answered 400. Whoever sends them without end fills no log: uvicorn writes a line for each."""
    kept = Kept()
    loggers = [logging.getLogger(name) for name in ("uvicorn.error", "uvicorn.access", connection.__name__)]
    for logger in loggers:
        logger.addHandler(kept)
    try:
        for _ in range(100):
            with wired(Starlette()) as (protocol, wire, loop):
                protocol.data_received(invalid)
                loop.run_until_complete(turn())
                assert wire.sent.startswith(b"HTTP/1.1 400 ")
                assert wire.is_closing()
    finally:
        for logger in loggers:
            logger.removeHandler(kept)
    assert not kept.records


def test_one_that_is_late(address: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it was begun or not, and after another; one that was answered in time was not late."""
    with connected(address) as sock:
        sock.sendall(LINE + b"\r\n")
        answer = sock.recv(65536)
        monkeypatch.setattr(connection, "HEAD_S", 0.3)
        sock.sendall(LINE)
        late = answered(sock)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert late[0] == 408
    for begun in (b"", LINE):
        with connected(address) as sock:
            sock.sendall(begun)
            assert answered(sock)[0] == 408


@pytest.mark.parametrize("more", [b"\r\n", b"\n"])
def test_one_that_sends_what_begins_nothing(address: tuple[str, int], more: bytes) -> None:
    """Behind an answer: it begins no request, and is refused at once."""
    with connected(address) as sock:
        sock.sendall(LINE + b"\r\n")
        assert sock.recv(65536).startswith(b"HTTP/1.1 200 ")
        sock.sendall(more)
        assert answered(sock)[0] == 400


def test_one_that_was_answered_before_its_end(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its body drips on, and nobody reads it."""
    monkeypatch.setattr(connection, "HEAD_S", 1.0)
    with connected(address) as sock:
        sock.sendall(LINE.replace(b"/", b"/none", 1) + b"Content-Length: 1000\r\n\r\n")
        assert sock.recv(65536).startswith(b"HTTP/1.1 404 ")
        sock.settimeout(0.05)
        for _ in range(200):
            try:
                sock.sendall(b"x")
                if not sock.recv(65536):
                    break
            except TimeoutError:
                continue
            except (BrokenPipeError, ConnectionResetError):
                break
        else:
            pytest.fail("it is read for ever")


def test_what_is_within(address: tuple[str, int]) -> None:
    """A long head is taken, a body of any length behind it, and another request on the connection."""
    long = LINE + b"X: " + b"x" * (HEAD_BYTES - 4096) + b"\r\n"
    size = 4 << 20
    with connected(address) as sock:
        for _ in range(3):
            sock.sendall(long.replace(b"GET", b"POST") + b"Content-Length: %d\r\n\r\n" % size)
            sock.sendall(b"x" * size)
        sock.sendall(LINE + b"Connection: close\r\n\r\n")
        status, body = answered(sock)
    assert status == 200
    assert body.count(b"3 %d" % size) == 3


def test_trailers_are_no_headers(address: tuple[str, int]) -> None:
    """What a proxy in front takes off, or sets, cannot be put back behind the body."""
    begin = CHUNKED.removesuffix(b"\r\n") + b"Connection: close\r\n\r\n"
    with connected(address) as sock:
        sock.sendall(begin + b"1\r\na\r\n0\r\nX-User: b\r\nAuthorization: c\r\n\r\n")
        assert answered(sock) == (200, b"3 1")
