"""A real OCI registry on loopback, and artifacts as clients push them."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from lora_fs.demo.process import LOCAL
from lora_fs.sidecar.sources.remote.oci.manifest import MANIFESTS
from tests.sources.conftest import WebServer, tar_of

ROOT = Path(__file__).parents[2]
REQUIRED = "LORA_FS_REQUIRE_OCI_REGISTRY"
TITLE, FILEPATH = "org.opencontainers.image.title", "org.cncf.model.filepath"


def program() -> str:
    """The registry's program; skips the test where there is none, and none is required."""
    found = subprocess.run(
        [sys.executable, str(ROOT / ".ci/oci_registry.py")], capture_output=True, text=True, check=True
    )
    if not found.stdout.strip():
        assert REQUIRED not in os.environ, found.stderr
        pytest.skip(found.stderr)
    return found.stdout.strip()


@contextmanager
def running(program: str, folder: Path, data: Path, **more: Any) -> Iterator[str]:
    """A registry over ``data``; yields its host and port. ``more``: of its configuration."""
    folder.mkdir()
    port = _free_port()
    config = {
        "version": 0.1,
        "log": {"level": "error", "accesslog": {"disabled": True}},
        "storage": {"filesystem": {"rootdirectory": str(data)}},
        "http": {"addr": f"127.0.0.1:{port}"},
        **more,
    }
    (folder / "config.yml").write_text(json.dumps(config))  # JSON is YAML
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [program, "serve", str(folder / "config.yml")], stdout=log, stderr=log, env=_without_otel()
        )
    try:
        _answers(f"http://127.0.0.1:{port}/v2/", process, folder / "log")
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(10)


def _without_otel() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("OTEL_", "REGISTRY_"))}


def _free_port() -> int:
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def _answers(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + 30
    while True:
        try:
            httpx.get(url, **LOCAL)
            return
        except httpx.TransportError:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.02)  # the registry has no signal for it


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


class Artifact:
    """A manifest and its blobs, by digest."""

    def __init__(self, *layers: tuple[str, bytes, dict[str, str]], media_type: str = MANIFESTS[0]) -> None:
        """``layers``: each with its media type, bytes and annotations."""
        self.blobs = {digest_of(data): data for _, data, _ in layers} | {digest_of(b"{}"): b"{}"}
        self.media_type = media_type
        self.body: dict[str, Any] = {
            "schemaVersion": 2,
            "mediaType": media_type,
            "config": {
                "mediaType": "application/vnd.oci.empty.v1+json",
                "digest": digest_of(b"{}"),
                "size": 2,
            },
            "layers": [
                {"mediaType": kind, "digest": digest_of(data), "size": len(data), "annotations": notes}
                for kind, data, notes in layers
            ],
        }

    @property
    def manifest(self) -> bytes:
        return json.dumps(self.body).encode()

    def push(self, host: str, repository: str, tag: str) -> str:
        """Push to a real registry; returns the manifest's digest."""
        base = f"http://{host}/v2/{repository}"
        with httpx.Client(**LOCAL) as client:
            for digest, data in self.blobs.items():
                begun = client.post(f"{base}/blobs/uploads/").raise_for_status()
                url = httpx.URL(begun.headers["Location"]).copy_merge_params({"digest": digest})
                client.put(url, content=data).raise_for_status()
            return put_manifest(client, base, tag, self.manifest, self.media_type)

    def serve(self, web: WebServer, repository: str = "acme/sql", tag: str = "v1", **odd: Any) -> str:
        """Let a web server answer as a registry does; returns the source. ``odd``: of the blobs."""
        base = f"/v2/{repository}"
        for digest, data in self.blobs.items():
            web.put(f"{base}/blobs/{digest}", data, **odd)
        for named in (tag, digest_of(self.manifest)):
            web.put(f"{base}/manifests/{named}", self.manifest)
        return f"oci://127.0.0.1:{web.port}/{repository}:{tag}"


def put_manifest(client: httpx.Client, base: str, tag: str, data: bytes, media_type: str) -> str:
    client.put(
        f"{base}/manifests/{tag}", content=data, headers={"Content-Type": media_type}
    ).raise_for_status()
    return digest_of(data)


def of_files(folder: Path, kind: str = "application/octet-stream", title: str = TITLE) -> Artifact:
    """Each file a layer with its name."""
    return Artifact(*((kind, path.read_bytes(), {title: path.name}) for path in sorted(folder.iterdir())))


def of_tar(folder: Path, kind: str, **annotations: str) -> Artifact:
    """The folder as one tar, packed where the type says so."""
    data = tar_of(folder)
    return Artifact((kind, gzip.compress(data) if kind.endswith("gzip") else data, annotations))


def of_tars(folder: Path, kind: str, **annotations: str) -> Artifact:
    """Each file a tar of its own, as olot and ModelPack's modctl make them."""
    layers = []
    for path in sorted(folder.iterdir()):
        one = folder.parent / f"only-{path.name}"
        one.mkdir()
        (one / path.name).write_bytes(path.read_bytes())
        layers.append((kind, tar_of(one, prefix="models/"), {TITLE: path.name, **annotations}))
    return Artifact(*layers)
