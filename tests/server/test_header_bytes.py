"""What becomes of a header's bytes on the way to the engine, through the sidecar and through a gateway."""

from __future__ import annotations

import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Final

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.datastructures import Headers

from lora_fs.sidecar.gateway.app import create_gateway
from lora_fs.sidecar.gateway.discovery import Given
from lora_fs.sidecar.server.app import create_app
from lora_fs.sidecar.server.middleware.access import Admin
from lora_fs.sidecar.server.proxy.canary import user_of
from tests.server.conftest import FakeReplica, serving, until

BODY: Final = b'{"model": "tiny"}'
ALLOWED: Final = bytes([0x09, *range(0x20, 0x7F), *range(0x80, 0x100)])
ENDS: Final = b" \t"  # no part of a value, where they stand at an end of it
values = st.one_of(
    st.lists(st.sampled_from(ALLOWED), max_size=20).map(bytes),
    st.text(st.characters(exclude_categories=["Cc", "Cs"]), max_size=20).map(str.encode),
).map(lambda value: value.strip(ENDS))


class Engine(socketserver.ThreadingTCPServer):
    """Answers ``{}``, and keeps the header ``x-user`` of each request as it came."""

    daemon_threads = True

    def __init__(self) -> None:
        self.users = list[bytes]()
        engine = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                for line in iter(self.rfile.readline, b"\r\n"):
                    name, _, value = line.partition(b":")
                    if name.lower() == b"x-user":
                        engine.users.append(value.strip(b" \t\r\n"))
                self.rfile.read(len(BODY))
                self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")

        super().__init__(("127.0.0.1", 0), Handler)


def ask(url: str, user: bytes) -> int:
    """Ask for a completion; return the answer's status."""
    host, _, port = url.removeprefix("http://").partition(":")
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json"
    with socket.create_connection((host, int(port)), timeout=60) as client, client.makefile("rb") as answers:
        client.sendall(head + b"\r\nX-User: %b\r\nContent-Length: %d\r\n\r\n%b" % (user, len(BODY), BODY))
        status = int(answers.readline().split()[1])
        answers.read()
        return status


@pytest.fixture(scope="module")
def hops() -> Iterator[tuple[Engine, list[str]]]:
    """An engine, and before it the URLs of a sidecar and of a gateway."""
    with ExitStack() as opened:
        engine = opened.enter_context(Engine())
        threading.Thread(target=engine.serve_forever, args=(0.01,), daemon=True).start()
        opened.callback(engine.shutdown)
        at = f"http://127.0.0.1:{engine.server_address[1]}"
        sidecar = opened.enter_context(serving(create_app(FakeReplica(), engine_url=at, admin=Admin(None))))
        gateway = opened.enter_context(serving(create_gateway(Given([sidecar]))))
        until(
            lambda: httpx.get(f"{gateway}/health", timeout=60).status_code == 200,
            "the gateway finds the sidecar",
        )
        yield engine, [sidecar, gateway]


@settings(max_examples=60, deadline=None)
@given(value=values)
def test_a_header_in_utf_8_reaches_the_engine_as_it_is(hops: tuple[Engine, list[str]], value: bytes) -> None:
    """Through one hop and through two. Bytes that are no UTF-8 are ISO 8859-1, and go on as UTF-8."""
    engine, urls = hops
    try:
        value.decode()
        sent = value
    except UnicodeDecodeError:
        sent = value.decode("latin-1").encode()
    for url in urls:
        engine.users.clear()
        assert ask(url, value) == 200
        assert engine.users == [sent]


@given(text=st.text(st.characters(exclude_categories=["Cc", "Cs"], max_codepoint=0xFF), min_size=1))
def test_a_user_is_the_same_however_a_client_writes_it(text: str) -> None:
    """In UTF-8, and in the body. In ISO 8859-1, too, but for the few texts whose bytes are UTF-8 as well."""
    one = user_of(Headers(raw=[(b"x-user", text.encode())]), "x-user", "other")
    assert one == text == user_of(Headers(raw=[]), "x-user", text)
    before_utf_8 = text.encode("latin-1")
    try:
        before_utf_8.decode()
    except UnicodeDecodeError:
        assert user_of(Headers(raw=[(b"x-user", before_utf_8)]), "x-user", "other") == text
