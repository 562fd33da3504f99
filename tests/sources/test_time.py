"""A server that is never done costs a fetch its time and no more: also before the first byte of the file."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from lora_fs.sidecar.errors import SourceUnavailable
from lora_fs.sidecar.model import Scope
from lora_fs.sidecar.reconcile.admin.fetching import Fetching, register
from lora_fs.sidecar.registry.lifecycle.ingest import Registration
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.sources.offer import Options
from lora_fs.sidecar.sources.remote.connection import opener
from lora_fs.sidecar.validate import Expectation
from tests.registry.conftest import write_adapter
from tests.sources.conftest import LoraFs, WebServer

DRIP_S = 0.05
MOST_DRIPS = 600
SOON_DRIPS = (
    80  # as long as this process is run: what the machine takes away, it takes from server and client
)


@dataclass
class Dripping:
    """A server at ``url``, how many bytes it has dripped, and whether it was asked."""

    url: str
    drips: int = 0
    asked: bool = False


@contextmanager
def dripping(first: bytes) -> Iterator[Dripping]:
    """A server whose headers come one byte at a time, after ``first``."""
    server = socket.create_server(("127.0.0.1", 0))
    told = Dripping(f"http://127.0.0.1:{server.getsockname()[1]}")

    def serve() -> None:
        while True:
            try:
                one, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=drip, args=(one,), daemon=True).start()

    def drip(one: socket.socket) -> None:
        with one:
            try:
                one.sendall(first)
                told.asked = True
                while told.drips < MOST_DRIPS:
                    one.sendall(b"x")
                    told.drips += 1
                    time.sleep(DRIP_S)
            except OSError:
                return

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield told
    finally:
        server.close()


@pytest.mark.parametrize("first", [b"", b"HTTP/1.1 200 OK\r\nX-A: "])
@pytest.mark.parametrize("redirected", [False, True])
def test_headers_that_drip_are_bounded(
    first: bytes, redirected: bool, lora_fs: LoraFs, web: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No byte of the file was asked for yet; the time is over all the same."""
    monkeypatch.setenv("LORA_FS_FETCH_TIMEOUT_S", "0.5")
    with dripping(first) as server:
        if redirected:
            web.put("/a.tar", b"", location=f"{server.url}/a.tar")
        ran = lora_fs("register", "sql", f"{web.url if redirected else server.url}/a.tar")
        assert (ran.code, "LORA_FS_FETCH_TIMEOUT_S" in ran.err) == (1, True), ran.err
        assert server.drips < SOON_DRIPS


def test_a_host_of_many_addresses_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes its own time to fail: no further one is tried once the time is over."""
    tried = list[str]()

    def resolve(host: str, port: int, **_: object) -> list[object]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (f"192.0.2.{n}", port)) for n in range(9)]

    def connect(address: tuple[str, int], *_: object) -> socket.socket:
        tried.append(address[0])
        raise TimeoutError

    def alive() -> None:
        if len(tried) == 2:
            raise SourceUnavailable("the time is over")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(socket, "create_connection", connect)
    with pytest.raises(SourceUnavailable, match="the time is over"):
        opener(alive).open("http://models.example.com/a.tar", timeout=30)
    assert tried == ["192.0.2.0", "192.0.2.1"]


@pytest.mark.parametrize("first", [b"", b"HTTP/1.1 200 OK\r\nX-A: "])
def test_a_look_by_another_client_is_bounded(
    first: bytes, lora_fs: LoraFs, s3: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket's own knows nothing of the time that is left."""
    import s3fs

    monkeypatch.setenv("LORA_FS_FETCH_TIMEOUT_S", "0.5")
    with dripping(first) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.url)
        s3fs.S3FileSystem.clear_instance_cache()
        ran = lora_fs("register", "sql", "s3://loras/sql")
        assert (ran.code, "LORA_FS_FETCH_TIMEOUT_S" in ran.err) == (1, True), ran.err
        assert server.drips < SOON_DRIPS


def test_a_dry_import_is_bounded(lora_fs: LoraFs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It looks, as a fetch begins."""
    monkeypatch.setenv("LORA_FS_FETCH_TIMEOUT_S", "0.5")
    lora_fs("register", "other", str(write_adapter(tmp_path / "other")))
    with dripping(b"") as server:
        listed = f"{{id: sql, base-model: tiny, source: '{server.url}/a.tar'}}"
        (tmp_path / "cm.yaml").write_text(f"vLLMLoRAConfig: {{ensureExist: {{models: [{listed}]}}}}")
        ran = lora_fs("import", "gie", "cm.yaml", "--dry-run")
        assert (ran.code, "LORA_FS_FETCH_TIMEOUT_S" in ran.out) == (1, True), ran.out + ran.err
        assert server.drips < SOON_DRIPS


def test_a_stop_ends_a_look(registry: Registry, scope: Scope) -> None:
    """Of a server that says nothing, at once."""
    fetching = Fetching(Options(), 1 << 20, 60.0)
    with dripping(b"") as server:
        with pytest.raises(SourceUnavailable, match="stopped"):
            register(
                registry,
                scope,
                Registration("sql", Path(), ""),
                f"{server.url}/a.tar",
                Expectation(),
                replace(fetching, stop=lambda: server.asked),
                writer="test",
            )
        assert server.drips < SOON_DRIPS
