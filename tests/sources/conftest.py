"""Real servers on loopback: a web server that misbehaves as told, a hub that speaks the hub's API, and S3."""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
import subprocess
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from moto.server import ThreadedMotoServer

from lora_fs.sidecar.model import Scope
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.registry.volume import atomic
from lora_fs.sidecar.sources.receive import transfer
from tests.cli.conftest import LORA_FS, LoraFs, lora_fs, root
from tests.registry.conftest import registry, scope, write_adapter

__all__ = ["lora_fs", "registry", "root", "scope"]

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"


@dataclass
class Odd:
    """How one path is answered: all of it, at once and truthfully, unless told otherwise.

    Attributes:
        cut: close the connection after so many bytes, the first ``times`` times.
        stall: stop sending at this byte of the file, until the test ends.
        pace: wait so many seconds before each 64 KiB.
        adds: say so many bytes more than there are.
        ranged: whether a part may be asked for.
        fails: answer with ``status`` so many ``times`` alone.
    """

    fails: bool = False
    cut: int | None = None
    times: int = 1
    stall: int | None = None
    pace: float = 0.0
    adds: int = 0
    ranged: bool = True
    status: int | None = None
    location: str | None = None
    etag: str | None = None
    lengthless: bool = False
    password: str | None = None
    encoding: str | None = None
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class WebServer:
    """Files by path, or path and query; ``asked`` is each request: its path, its Range, its Authorization."""

    files: dict[str, bytes] = field(default_factory=dict)
    odd: dict[str, Odd] = field(default_factory=dict)
    asked: list[tuple[str, str | None, str | None]] = field(default_factory=list)
    sent: int = 0
    api: Callable[[str], Any] = lambda _: None
    go: threading.Event = field(default_factory=threading.Event)
    began: threading.Event = field(default_factory=threading.Event)
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def put(self, path: str, data: bytes, **odd: Any) -> str:
        """Serve ``data``; returns its URL."""
        self.files[path], self.odd[path] = data, Odd(**odd)
        return self.url + path

    def bodies(self, path: str) -> list[str | None]:
        """The ranges that were asked of a path, those of one byte left out."""
        return [part for at, part, _ in self.asked if at == path and part != "bytes=0-0"]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Any

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.close_connection = True
        web: WebServer = self.server.web
        path = self.path if self.path in web.files else self.path.partition("?")[0]
        authorization = self.headers.get("Authorization")
        web.asked.append((self.path, self.headers.get("Range"), authorization))
        answer = web.api(self.path)
        if answer is not None:
            self._send(200, json.dumps(answer).encode(), Odd(), {"Content-Type": "application/json"})
            return
        odd = web.odd.get(path, Odd())
        if odd.location is not None:
            self._send(302, b"", Odd(), {"Location": odd.location})
        elif (odd.status is not None and odd.times > 0) or path not in web.files:
            told = {"X-Error-Code": "RepoNotFound"} if path.startswith("/api/") and not odd.status else {}
            odd.times -= 1 if odd.fails else 0
            self._send(odd.status or 404, b"no", Odd(), told | odd.headers)
        elif odd.password is not None and authorization != f"Basic {odd.password}":
            self._send(401, b"no", Odd(), {})
        else:
            self._file(web.files[path], odd)

    do_HEAD = do_GET

    def _file(self, data: bytes, odd: Odd) -> None:
        etag = odd.etag if odd.etag is not None else f'"{hashlib.sha256(data).hexdigest()[:32]}"'
        headers = {"ETag": etag} if etag else {}
        part = self.headers.get("Range")
        if part is None or not odd.ranged:
            self._send(200, data, odd, headers | odd.headers)
            return
        start, _, end = part.removeprefix("bytes=").partition("-")
        chosen = data[int(start) : int(end) + 1 if end else None]
        if not chosen:
            self._send(416, b"", Odd(), {"Content-Range": f"bytes */{len(data)}"})
            return
        last = int(start) + len(chosen) - 1
        headers["Content-Range"] = f"bytes {start}-{last}/{len(data) + odd.adds}"
        self._send(206, chosen, odd, headers | odd.headers, int(start))

    def _send(self, status: int, data: bytes, odd: Odd, headers: dict[str, str], start: int = 0) -> None:
        web: WebServer = self.server.web
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if odd.encoding:
            self.send_header("Content-Encoding", odd.encoding)
        if not odd.lengthless:
            self.send_header("Content-Length", str(len(data) + odd.adds))
        self.end_headers()
        if self.command == "HEAD":
            return
        sent = 0
        small = self.headers.get("Range") == "bytes=0-0"
        while sent < len(data):
            upto = min(sent + (64 << 10), len(data))
            limit = odd.cut if odd.times > 0 else None
            for bound in (limit, None if odd.stall is None else max(0, odd.stall - start)):
                upto = upto if bound is None or small else min(upto, bound)
            if upto <= sent:
                break
            try:
                self.wfile.write(data[sent:upto])
                self.wfile.flush()
            except OSError:
                return
            web.sent += upto - sent
            sent = upto
            if sent > 1 << 16:
                web.began.set()
            if odd.pace:
                time.sleep(odd.pace)
        if sent < len(data) and odd.stall is not None:
            web.began.set()
            web.go.wait(30)
        elif sent < len(data):
            odd.times -= 1


def serving(web: WebServer) -> Iterator[WebServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    server.web = web  # type: ignore[attr-defined]
    web.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield web
    finally:
        web.go.set()
        server.shutdown()
        server.server_close()


@pytest.fixture
def web() -> Iterator[WebServer]:
    yield from serving(WebServer())


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tries follow each other at once, and links go at once."""
    monkeypatch.setattr(transfer, "BACKOFF_S", 0.01)
    monkeypatch.setattr(atomic, "UNLINK_AFTER_S", 0.0)
    for name in ("HF_TOKEN", "HF_ENDPOINT", "NETRC", "http_proxy", "https_proxy", "LORA_FS_ALLOWED_REMOTES"):
        monkeypatch.delenv(name, raising=False)


@dataclass
class Hub:
    """A hub with one repository: its files in git by name, and those in LFS."""

    web: WebServer
    repo: str = "acme/sql-lora"
    commit: str = "c" * 40
    refs: dict[str, str] = field(default_factory=dict)
    token: str | None = None

    def publish(self, folder: Path, commit: str, under: str = "") -> None:
        """Make ``commit`` what ``main`` is."""
        self.commit = commit
        self.refs |= {"main": commit, commit: commit}
        siblings = []
        for path in sorted(folder.iterdir()):
            data, name = path.read_bytes(), under + path.name
            sibling: dict[str, Any] = {"rfilename": name, "size": len(data)}
            sibling["blobId"] = hashlib.sha1(
                b"blob %d\0" % len(data) + data, usedforsecurity=False
            ).hexdigest()
            where = f"/{self.repo}/resolve/{commit}/{name}"
            if path.suffix == ".safetensors":
                sha256 = hashlib.sha256(data).hexdigest()
                sibling["lfs"] = {"sha256": sha256, "size": len(data), "pointerSize": 130}
                stored = self.web.put(f"/lfs/{sha256}", data).replace("127.0.0.1", "localhost")
                self.web.odd[where] = Odd(location=f"{stored}?X-Amz-Signature=secret4711")
            else:
                self.web.put(where, data)
            siblings.append(sibling)
        self.siblings = siblings
        self.web.api = self._api

    def _api(self, path: str) -> Any:
        prefix = f"/api/models/{self.repo}"
        if not path.startswith(prefix):
            return None
        revision = path.removeprefix(prefix).partition("?")[0].removeprefix("/revision/") or "main"
        if revision.replace("%2F", "/") not in self.refs:
            return None
        return {"id": self.repo, "sha": self.refs[revision.replace("%2F", "/")], "siblings": self.siblings}


@pytest.fixture
def hub(web: WebServer, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """The client of this process asks it, and the commands that a test starts do."""
    from huggingface_hub import constants

    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, web.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", web.url)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nonexistent/token")
    monkeypatch.setenv("HF_ENDPOINT", web.url)
    return Hub(web)


@pytest.fixture(scope="session")
def s3_url() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def s3(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A client of an S3 with the bucket ``loras``, which lora-fs finds by the environment."""
    import boto3
    import s3fs

    for name, value in {
        "AWS_ACCESS_KEY_ID": "AKIA4711",
        "AWS_SECRET_ACCESS_KEY": "hush-hush",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL_S3": s3_url,
        "AWS_CONFIG_FILE": "/nonexistent/config",
    }.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3")
    client.create_bucket(Bucket="loras")
    yield client
    for one in client.list_objects_v2(Bucket="loras").get("Contents", []):
        client.delete_object(Bucket="loras", Key=one["Key"])
    client.delete_bucket(Bucket="loras")
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "made" / "sql-lora", seed=1)


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """An adapter of 8 MB."""
    return large_adapter(tmp_path / "made" / "large")


def large_adapter(folder: Path, seed: int = 5) -> Path:
    import numpy as np
    from safetensors.numpy import save_file

    write_adapter(folder, rank=256)
    numbers = np.random.default_rng(seed)
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    shapes = {"A": (256, 4096), "B": (4096, 256)}
    tensors = {
        f"{module}.lora_{part}.weight": numbers.random(shape, dtype=np.float32) + 0.1
        for part, shape in shapes.items()
    }
    save_file(tensors, folder / WEIGHTS)
    return folder


def tar_of(folder: Path, mode: str = "w", prefix: str = "sql-lora/") -> bytes:
    """A tar of a folder's files."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as archive:  # type: ignore[call-overload]
        for path in sorted(folder.iterdir()):
            archive.add(path, prefix + path.name)
    return out.getvalue()


class Command:
    """``lora-fs`` in a process of its own."""

    def __init__(self, *words: str) -> None:
        self.process = subprocess.Popen(
            [LORA_FS, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ)
        )

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err


def left_in(root: Path) -> list[str]:
    """What lies in ``.incoming`` of the scope."""
    return sorted(path.name for path in (root / "default/tiny/.incoming").glob("*"))


__all__ += ["LoraFs", "Registry", "Scope"]
