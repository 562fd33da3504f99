"""What requests can make a replica fetch and write, and where credentials go: docs/security.md."""

from __future__ import annotations

import base64
import logging
import tarfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from lora_fs.sidecar.errors import InputError
from lora_fs.sidecar.model import Scope
from lora_fs.sidecar.reconcile.admin.fetching import Fetching
from lora_fs.sidecar.reconcile.admin.service import LoadRequest, Registrations
from lora_fs.sidecar.reconcile.admin.uploads import Upload
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.sources.allowed import AllowedRemotes
from lora_fs.sidecar.sources.offer import ARCHIVE, Options
from lora_fs.sidecar.validate import Expectation
from tests.registry.conftest import write_adapter
from tests.security.test_files import NoVolume
from tests.sources.conftest import WebServer, serving, tar_of
from tests.sources.test_tarball import named, pack

pytestmark = pytest.mark.anyio
SECRET = "hush-4711"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def web() -> Iterator[WebServer]:
    yield from serving(WebServer())


def over_http(registry: Registry, scope: Scope, *remotes: str, plugin: str | None = None) -> Registrations:
    """What a load over HTTP registers with."""
    options = Options(AllowedRemotes(remotes).check, stall_s=2.0)
    return Registrations(
        registry,
        (scope,),
        NoVolume(),  # type: ignore[arg-type]
        Expectation(),
        allowed_sources=(),
        timeout_s=20,
        fetching=Fetching(options, 1 << 20, 20.0, plugin),
        wait_s=20,
    )


async def test_what_is_fetched(registry: Registry, scope: Scope, web: WebServer, tmp_path: Path) -> None:
    """A request makes a replica fetch from another machine only what `LORA_FS_ALLOWED_REMOTES` covers by
    scheme, host and whole segments, redirects of web servers included; by default nothing."""
    url = web.put("/loras/a.tar", tar_of(write_adapter(tmp_path / "a")))
    web.put("/loras/away.tar", b"", location=f"http://localhost:{web.port}/loras/a.tar")
    web.put("/loras/up.tar", b"", location="/private/a.tar")
    here, other = f"{web.url}/loras", url.replace("127.0.0.1", "localhost")
    for remotes, asked in (
        ((), [url, "hf://a/b", "s3://a/b", "gs://a/b", "ftp://a/b", "name-for-the-downloader"]),
        (("hf://", "https://127.0.0.1", web.url[:-1], "plugin://x"), [url]),
        (
            (here,),
            [other, f"{web.url}/loras-too/a.tar", f"{web.url}/loras/away.tar", f"{web.url}/loras/up.tar"],
        ),
    ):
        http = over_http(registry, scope, *remotes, plugin="no.such.Downloader")
        for number, source in enumerate(asked):
            with pytest.raises(InputError, match="LORA_FS_ALLOWED_REMOTES"):
                await http.register(LoadRequest(f"no-{number}", source), "test")
    assert {path for path, _, _ in web.asked} == {"/loras/away.tar", "/loras/up.tar"}
    record, _ = await over_http(registry, scope, here).register(LoadRequest("yes", url), "test")
    assert record.spec.source.uri == url


async def test_what_is_not_told(
    registry: Registry, scope: Scope, web: WebServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Userinfo and query of a source's URL are in no record, answer, log, audit line or status file."""
    caplog.set_level(logging.DEBUG)
    web.put("/a.tar", tar_of(write_adapter(tmp_path / "a")), cut=700)
    http = over_http(registry, scope, web.url)
    secret = web.url.replace("//", f"//me:{SECRET}@")
    await http.register(LoadRequest("good", f"{secret}/a.tar?sig={SECRET}"), "test")
    told = []
    for path in ("/none.tar", "/a%2ftar", "/", "/a.safetensors", "/a.tar#x"):
        with pytest.raises(InputError) as refused:
            await http.register(LoadRequest("bad", f"{secret}{path}?sig={SECRET}"), "test")
        told.append(str(refused.value))
    told += [path.read_text() for path in registry.layout.root.rglob("*.json")]
    assert any(f"?sig={SECRET}" in path for path, _, _ in web.asked)
    assert SECRET not in "".join(told) + caplog.text


async def test_where_credentials_go(registry: Registry, scope: Scope, web: WebServer, tmp_path: Path) -> None:
    """A password or a token for a source's host is sent to no other one, wherever it redirects."""
    web.put("/a.tar", b"", location=f"http://localhost:{web.port}/b.tar")
    web.put("/b.tar", tar_of(write_adapter(tmp_path / "a")))
    http = over_http(registry, scope, "*")
    url = f"{web.url}/a.tar".replace("//", f"//me:{SECRET}@")
    await http.register(LoadRequest("good", url), "test")
    sent = base64.b64encode(f"me:{SECRET}".encode()).decode()
    assert {who for path, _, who in web.asked if path == "/a.tar"} == {f"Basic {sent}"}
    assert {who for path, _, who in web.asked if path == "/b.tar"} == {None}


async def test_what_is_unpacked(registry: Registry, scope: Scope, web: WebServer, tmp_path: Path) -> None:
    """Of an uploaded or fetched archive only the files that are served are written, none of them outside
    its folder."""
    http = over_http(registry, scope, web.url)
    made = write_adapter(tmp_path / "a")
    (made / "run.sh").write_text("#!/bin/sh\n")
    hostile = [
        pack((named("../../adapter_config.json"), b"{}")),
        pack((named("/tmp/adapter_config.json"), b"{}")),
        pack((named("adapter_model.safetensors", tarfile.SYMTYPE, "/etc/passwd"), b"")),
    ]
    for number, data in enumerate(hostile):
        with pytest.raises(InputError):
            await http.register(LoadRequest(f"bad-{number}", web.put(f"/{number}.tar", data)), "test")
        with pytest.raises(InputError):
            await http.upload(Upload(f"sent-{number}", _chunks(data)), "test")
    fetched, _ = await http.register(LoadRequest("fetched", web.put("/a.tar", tar_of(made))), "test")
    sent = await http.upload(Upload("sent", _chunks(tar_of(made))), "test")
    for record in (fetched, sent.record):
        folder = registry.layout.resolve(record.spec.path)
        assert {path.name for path in folder.iterdir()} == {
            "adapter_config.json",
            "adapter_model.safetensors",
        }
    assert not list(registry.layout.incoming(scope).iterdir())


async def _chunks(data: bytes) -> AsyncIterator[tuple[str, bytes]]:
    yield ARCHIVE, data
