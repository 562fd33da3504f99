"""Bytes that two servers may read as different requests are refused, and the engine gets none of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.conftest import FakeEngine, FakeReplica, serving
from tests.server.test_wire import ask, sidecar

POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
SECOND = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"
CORPUS = {
    "two lengths": POST + b"Content-Length: 2\r\nContent-Length: 60\r\n\r\n{}",
    "a list of lengths": POST + b"Content-Length: 2, 60\r\n\r\n{}",
    "a signed length": POST + b"Content-Length: +2\r\n\r\n{}",
    "an empty length": POST + b"Content-Length: \r\n\r\n{}",
    "a length and chunks": POST + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks and a length": POST + b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n",
    "an unknown coding": POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "a coding before chunks": POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "chunks twice": POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks, then none": POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
    "a hidden coding": POST + b"Transfer-Encoding:\x0bchunked\r\n\r\n0\r\n\r\n",
    "a blank before the colon": POST + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
    "a continued line": POST + b"X: a\r\n Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks in HTTP/1.0": CHUNKED.replace(b"/1.1", b"/1.0") + b"0\r\n\r\n",
    "a line feed alone": POST.replace(b"\r\n", b"\n") + b"Content-Length: 2\n\n{}",
    "a carriage return alone": POST + b"X: a\rContent-Length: 2\r\n\r\n{}",
    "a zero byte": POST + b"X: a\0b\r\nContent-Length: 2\r\n\r\n{}",
    "a chunk's line feed alone": CHUNKED + b"2\n{}\r\n0\r\n\r\n",
    "a chunk in hexadecimal with a prefix": CHUNKED + b"0x2\r\n{}\r\n0\r\n\r\n",
    "a chunk longer than it says": CHUNKED + b"2\r\n{}}\r\n0\r\n\r\n",
    "two hosts": POST + b"Host: y\r\nContent-Length: 2\r\n\r\n{}",
    "a tunnel": b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n",
    "HTTP/2 without TLS": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a header without a name": POST + b": a\r\nContent-Length: 2\r\n\r\n{}",
    "a blank before the first header": b"POST /v1/completions HTTP/1.1\r\n Host: x\r\n\r\n",
}


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    engine = FakeEngine()
    engine.go.set()
    return engine


@pytest.fixture(scope="module")
def url(engine: FakeEngine) -> Iterator[str]:
    with serving(engine.app) as engine_url, sidecar(FakeReplica(), engine_url) as found:
        yield found


@pytest.mark.parametrize("request_", CORPUS.values(), ids=CORPUS.keys())
def test_what_can_be_read_in_two_ways_is_refused(url: str, engine: FakeEngine, request_: bytes) -> None:
    """Bytes that two servers may read as different requests get 400 or 501. The connection ends, and the
    engine gets none of them."""
    head, rest = ask(url, request_ + SECOND)
    assert int(head.split()[1]) in (400, 501), head
    assert rest.count(b"HTTP/1.1") <= 1  # in the message
    assert (engine.bodies, engine.paths) == ([], [])


def test_requests_in_one_piece_are_answered_in_their_order(url: str, engine: FakeEngine) -> None:
    """Requests that follow each other in one piece get their answers in their order, also behind chunks
    and behind an upgrade that the server declines."""
    upgrade = POST + b"Connection: Upgrade\r\nUpgrade: h2c\r\nTransfer-Encoding: chunked\r\n\r\n"
    last = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    asked = upgrade + b'e\r\n{"model":"a1"}\r\n0\r\n\r\n'
    head, rest = ask(url, asked + asked + SECOND + last)
    assert head.startswith(b"HTTP/1.1 200 ")
    assert rest.count(b"HTTP/1.1 200 ") == 3
    assert engine.bodies == [{"model": "a1"}, {"model": "a1"}, {}]
    engine.bodies.clear()


def test_http_1_0_may_offer_an_upgrade(url: str, engine: FakeEngine) -> None:
    """An HTTP/1.0 request that offers an upgrade gets an HTTP/1.0 answer: without chunks, and the
    connection ends."""
    asked = POST.replace(b"/1.1", b"/1.0") + b"Connection: Upgrade\r\nUpgrade: h2c\r\n"
    head, rest = ask(url, asked + b'Content-Length: 30\r\n\r\n{"model":"a1" , "stream":true}')
    assert b"transfer-encoding" not in head.lower()
    assert rest == b"data: one\n\ndata: [DONE]\n\n"
    engine.bodies.clear()


def test_what_is_wrong_behind_a_request_ends_the_connection_after_its_answer(
    url: str, engine: FakeEngine
) -> None:
    """No client can take a refusal for the answer to the request before it."""
    head, _ = ask(url, SECOND.replace(b"{}", b'{"model":"a1"}').replace(b": 2", b": 14") + b"\0")
    assert head.startswith(b"HTTP/1.1 200 ")
    engine.bodies.clear()
