"""Uploads at a gateway: they pass as they come, to one replica, whose answer ends them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from io import BufferedIOBase
from pathlib import Path

import httpx
import numpy as np
import pytest
from safetensors.numpy import save_file

from lora_fs.demo.process import Process
from lora_fs.sidecar.gateway.app import create_gateway
from lora_fs.sidecar.gateway.discovery import Given
from tests.gateway.conftest import Stubs
from tests.gateway.test_broadcast import HEADERS, owned
from tests.gateway.test_commands import command, ended
from tests.gateway.test_process import started, until
from tests.gateway.test_watch import TRUE
from tests.registry.conftest import write_adapter
from tests.server.conftest import serving

__all__ = ["owned"]  # a fixture

MIB = 1 << 20
PATHS = ("/v1/lora_adapters?name=big", "/v1/lora_adapters/default/tiny/big/upload")
Behave = Callable[["Asked"], None]


@dataclass
class Asked:
    """One upload, as a replica sees it."""

    head: bytes
    body: BufferedIOBase
    answers: BufferedIOBase

    def go_on(self) -> None:
        """Ask for the body."""
        self.answers.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def whole(self) -> bytes:
        """Read all of it."""
        length = re.search(rb"(?i)content-length: (\d+)", self.head)
        if length is not None:
            return self.body.read(int(length[1]))
        data = bytearray()
        while size := int(self.body.readline(), 16):
            data += self.body.read(size)
            self.body.readline()
        return bytes(data)

    def answer(self, status: int, text: str = "{}") -> None:
        said = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n"
        self.answers.write(f"{said}Connection: close\r\n\r\n{text}".encode())


@dataclass
class Replica:
    """A replica that does what a test says with an upload."""

    name: str
    behave: Behave
    uploads: list[bytes] = field(default_factory=list)  # their heads

    @contextlib.contextmanager
    def running(self) -> Iterator[str]:
        replica = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                head = b"".join(iter(self.rfile.readline, b"\r\n"))
                if head.startswith(b"GET /metadata"):
                    asked = Asked(head, self.rfile, self.wfile)
                    asked.answer(200, json.dumps({**TRUE, "replica": replica.name}))
                elif head:
                    replica.uploads.append(head)
                    with contextlib.suppress(OSError):
                        replica.behave(Asked(head, self.rfile, self.wfile))

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = allow_reuse_address = True

        with Server(("127.0.0.1", 0), Handler) as server:
            thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
            thread.start()
            yield f"http://127.0.0.1:{server.server_address[1]}"
            server.shutdown()


Fleet = Callable[..., str]


@pytest.fixture
def before() -> Iterator[Fleet]:
    """``before(replica, …)``: the URL of a gateway that has seen them."""
    with ExitStack() as opened:

        def start(*replicas: Replica, idle_timeout_s: float = 60.0) -> str:
            urls = [opened.enter_context(one.running()) for one in replicas]
            gateway = create_gateway(Given(urls), idle_timeout_s=idle_timeout_s)
            url = opened.enter_context(serving(gateway))
            names = sorted(one.name for one in replicas)
            until(lambda: httpx.get(f"{url}/health", timeout=60).json()["ready"] == names)
            return url

        yield start


def begun(url: str, path: str, *, length: int | None, body: bytes = b"", headers: str = "") -> socket.socket:
    """Begin an upload by hand."""
    host, _, port = url.removeprefix("http://").partition(":")
    client = socket.create_connection((host, int(port)), timeout=60)
    size = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    client.sendall(f"POST {path} HTTP/1.1\r\nHost: gateway\r\n{headers}{size}\r\n\r\n".encode() + body)
    return client


def status_of(client: socket.socket) -> int:
    """Read an answer's status."""
    with client, client.makefile("rb") as answers:
        return int(answers.readline().split()[1])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("has_length", [True, False])
def test_an_upload_waits_for_a_replica_that_does_not_read(before: Fleet, path: str, has_length: bool) -> None:
    """The gateway keeps a few hundred KiB of it at most, and what arrives is what was sent."""
    go, arrived = threading.Event(), list[str]()

    def slow(asked: Asked) -> None:
        asked.go_on()
        assert go.wait(60)
        arrived.append(hashlib.sha256(asked.whole()).hexdigest())
        asked.answer(201)

    data = os.urandom(MIB) * 48
    framed = memoryview(data if has_length else b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data))
    client = begun(before(Replica("r0", slow)), path, length=len(data) if has_length else None)
    client.settimeout(2)
    sent = 0
    with contextlib.suppress(TimeoutError):
        while sent < len(framed):
            sent += client.send(framed[sent : sent + MIB])
    assert 0 < sent < 32 * MIB  # in four sockets' buffers
    client.settimeout(60)
    go.set()
    client.sendall(framed[sent:])
    assert status_of(client) == 201
    assert arrived == [hashlib.sha256(data).hexdigest()]


def test_a_refusal_comes_before_the_body(before: Fleet) -> None:
    """A replica that does not ask for the body gets none of it, and its answer is the client's."""
    rests = list[bytes]()

    def refuse(asked: Asked) -> None:
        asked.answer(401)
        rests.append(asked.body.read())

    replica = Replica("r0", refuse)
    client = begun(before(replica), PATHS[0], length=8 << 30, body=b"x" * 1000)
    assert status_of(client) == 401
    until(lambda: rests == [b""])
    assert b"expect: 100-continue" in replica.uploads[0].lower()


def test_a_refusal_in_the_middle_ends_the_upload(before: Fleet) -> None:
    """The client reads it while it still sends, and the gateway sends the replica no more."""
    done = threading.Event()

    def refuse(asked: Asked) -> None:
        asked.go_on()
        asked.body.read(MIB)
        asked.answer(413)
        while asked.body.read(1 << 16):
            pass
        done.set()

    client = begun(before(Replica("r0", refuse)), PATHS[1], length=8 << 30, body=b"x" * MIB)
    assert status_of(client) == 413
    assert done.wait(60)


def test_an_upload_that_began_goes_to_no_other_replica(before: Fleet) -> None:
    """Its first bytes are gone. One whose replica asked for nothing goes to the next replica, whole."""
    replicas = [Replica(name, lambda asked: None) for name in ("r0", "r1")]
    first = list[Replica]()

    def breaks_off(asked: Asked) -> None:
        asked.go_on()
        asked.body.read(1000)

    def takes(asked: Asked) -> None:
        asked.go_on()
        assert asked.whole() == b"x" * 2000
        asked.answer(201)

    def by_turn(replica: Replica, begin: Behave) -> Behave:
        def behave(asked: Asked) -> None:
            first.append(replica)
            (begin if len(first) == 1 else takes)(asked)

        return behave

    url = before(*replicas)
    for begin, status, asked in ((lambda asked: None, 201, 2), (breaks_off, 503, 1)):
        first.clear()
        for replica in replicas:
            replica.behave = by_turn(replica, begin)
        until(lambda: len(httpx.get(f"{url}/health", timeout=60).json()["ready"]) == 2)
        client = begun(url, PATHS[0], length=2000, body=b"x" * 2000)
        assert status_of(client) == status
        assert len(first) == asked


def test_a_client_that_leaves_ends_its_upload(before: Fleet) -> None:
    """The replica sees the end at once."""
    came, left = threading.Event(), threading.Event()

    def read(asked: Asked) -> None:
        asked.go_on()
        asked.body.read(1000)
        came.set()
        asked.body.read()
        left.set()

    client = begun(before(Replica("r0", read)), PATHS[0], length=2000, body=b"x" * 1500)
    assert came.wait(60)
    client.close()
    assert left.wait(60)


@pytest.mark.parametrize(("path", "length"), [(PATHS[0], 8 << 30), ("/v1/completions", 48 * MIB)])
def test_a_replica_that_takes_nothing_more_is_given_up(before: Fleet, path: str, length: int) -> None:
    """After the time in which an answer's next byte has to come, too."""
    never = threading.Event()

    def hang(asked: Asked) -> None:
        asked.go_on()
        never.wait(60)

    url = before(Replica("r0", hang), idle_timeout_s=0.5)
    client = begun(url, path, length=length)
    threading.Thread(target=send_on, args=(client,), daemon=True).start()
    assert status_of(client) == 503
    never.set()


def send_on(client: socket.socket) -> None:
    """Send until nobody takes it."""
    with contextlib.suppress(OSError):
        while True:
            client.sendall(b"x" * MIB)


def big(folder: Path) -> Path:
    """Write an adapter of 80 MiB."""
    write_adapter(folder)
    rank, wide, at = 64, 160 * 1024, "base_model.model.model.layers.0.self_attn.q_proj"
    some = np.random.default_rng(1)
    tensors = {
        f"{at}.lora_A.weight": some.random((rank, wide), dtype=np.float32) + 0.1,
        f"{at}.lora_B.weight": some.random((wide, rank), dtype=np.float32) + 0.1,
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    config = folder / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "r": rank}))
    return folder


def memory(process: Process, what: str) -> int:
    """Bytes of a process: VmRSS now, VmHWM at most so far."""
    told = Path(f"/proc/{process.pid}/status").read_text()
    (kib,) = re.findall(rf"^{what}:\s+(\d+) kB$", told, re.MULTILINE)
    return int(kib) << 10


def test_a_large_adapter_is_registered_at_a_gateway(owned: Stubs, tmp_path: Path) -> None:
    """`lora-fs register FOLDER --server GATEWAY`, over the bound on other bodies, in 16 MiB of the gateway's
    memory. A sidecar's refusals are the client's."""
    owned.add(env={"LORA_FS_FETCH_MAX_BYTES": str(96 * MIB)})
    gateway = started(owned, replicas=1)
    before = memory(gateway, "VmRSS")
    code, out, err = ended(command(owned, gateway, "register", "big", str(big(tmp_path / "big"))))
    assert (code, out) == (0, "registered big@v1 in default/tiny\n"), err
    assert memory(gateway, "VmHWM") - before < 16 * MIB
    assert status_of(begun(gateway.url, PATHS[0], length=80 * MIB)) == 401
    known = "".join(f"{name}: {value}\r\n" for name, value in HEADERS.items())
    tar = f"{known}Content-Type: application/x-tar\r\n"
    assert status_of(begun(gateway.url, PATHS[0], length=97 * MIB, headers=tar)) == 413
    with httpx.Client(base_url=gateway.url, headers=HEADERS, timeout=60) as client:
        nothing = client.post(PATHS[0], headers={"Content-Type": "application/x-tar"})
        assert (nothing.status_code, "nothing was sent" in nothing.text) == (400, True)
        listed = client.get("/v1/lora_adapters").json()["data"]
        assert "big" in {one["name"] for one in listed}
