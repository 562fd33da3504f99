"""What requests can make a replica fetch and write, and where credentials go: docs/security.md."""

from __future__ import annotations

import base64
import hashlib
import logging
import socket
import tarfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from lora_fs.sidecar.errors import InputError
from lora_fs.sidecar.model import Scope
from lora_fs.sidecar.reconcile.admin.fetching import Fetching
from lora_fs.sidecar.reconcile.admin.service import LoadRequest, Registrations
from lora_fs.sidecar.reconcile.admin.uploads import Upload
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.sources.allowed import Allowed, AllowedRemotes
from lora_fs.sidecar.sources.offer import ARCHIVE, Options
from lora_fs.sidecar.validate import Expectation
from tests.registry.conftest import write_adapter
from tests.security.test_files import NoVolume
from tests.sources.conftest import CONFIG, Hub, WebServer, serving, tar_of
from tests.sources.oci import TITLE, of_files
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
    allowed = AllowedRemotes(remotes)
    options = Options(allowed.check, allowed.check_address, stall_s=2.0)
    return Registrations(
        registry,
        (scope,),
        NoVolume(),  # type: ignore[arg-type]
        Expectation(),
        allowed=Allowed(registry.layout.root),
        timeout_s=60,
        fetching=Fetching(options, 1 << 20, 20.0, plugin),
        wait_s=20,
    )


async def test_what_is_fetched(registry: Registry, scope: Scope, web: WebServer, tmp_path: Path) -> None:
    """A request makes a replica fetch only what `LORA_FS_ALLOWED_REMOTES` covers by scheme, host and
    whole segments. By default that is nothing. It must cover a redirect of a web server, too."""
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
    record = (await over_http(registry, scope, here).register(LoadRequest("yes", url), "test")).record
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


async def test_where_a_registry_sends(
    registry: Registry, scope: Scope, web: WebServer, tmp_path: Path
) -> None:
    """A redirect of an OCI registry leads to public addresses, or where an entry names its host. The same
    holds for the server of tokens that it names. Nothing of a manifest that it sends becomes a path.
    """
    adapter = write_adapter(tmp_path / "a")
    source = of_files(adapter).serve(web)
    http = over_http(registry, scope, f"oci://127.0.0.1:{web.port}/acme")
    where = next(path for path in web.files if "/blobs/" in path)
    inside = f"http://localhost:{web.port}/inside"
    web.odd[where].location = inside
    with pytest.raises(InputError, match="an address that is not public"):
        await http.register(LoadRequest("sql", source), "test")
    web.odd[where].location = None
    challenge = {"WWW-Authenticate": f'Bearer realm="{inside}",service="x"'}
    web.put("/v2/acme/sql/manifests/v1", b"", status=401, headers=challenge)
    with pytest.raises(InputError, match="an address that is not public"):
        await http.register(LoadRequest("sql", source), "test")
    climbing = of_files(adapter)
    climbing.body["layers"][0]["annotations"] = {TITLE: f"../../../{CONFIG}"}
    with pytest.raises(InputError, match="leaves its folder"):
        await http.register(LoadRequest("sql", climbing.serve(web, "acme/climbs")), "test")
    assert "/inside" not in {path.partition("?")[0] for path, _, _ in web.asked}
    assert not list(registry.layout.root.glob("**/v1/sql"))


INSIDE = (
    "127.0.0.1 10.0.0.7 172.16.0.1 192.168.1.1 169.254.169.254 100.64.0.1 0.0.0.0 224.0.0.1 ::1 :: "
    "fe80::1 fd00::1 ::ffff:10.0.0.7 64:ff9b::a00:7 2002:a00:7::1 "
    "fec0::2 64:ff9b:1::a00:7 ::10.0.0.7"
).split()


async def test_what_is_inside_the_network(
    registry: Registry, scope: Scope, web: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An entry that names no host, as `*` or `https://`, covers public addresses alone: no loopback,
    link-local or private one. A replica checks each address of a host when it connects to it."""
    web.put("/a.tar", data := tar_of(write_adapter(tmp_path / "a")))
    pin = f"#sha256={hashlib.sha256(data).hexdigest()}"
    answers: list[str] = []

    def resolve(host: str, port: int, *_: object, **__: object) -> list[Any]:
        if host == "models.example.com":
            host = answers.pop(0)
        return [(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    for number, address in enumerate(INSIDE):
        host = f"[{address}]" if ":" in address else address
        for remotes in (("*",), ("http://", "https://")):
            http = over_http(registry, scope, *remotes)
            for place in (host, "models.example.com"):
                answers[:] = [address]
                source = f"http://{place}:{web.port}/a.tar{pin}"
                with pytest.raises(InputError, match="not public") as refused:
                    await http.register(LoadRequest(f"no-{number}", source), "test")
                assert place == host or address not in str(refused.value)
    assert web.asked == []
    named = over_http(registry, scope, f"http://models.example.com:{web.port}")
    answers[:] = ["127.0.0.1"] * 9
    await named.register(LoadRequest("yes", f"http://models.example.com:{web.port}/a.tar{pin}"), "test")


async def test_where_the_hub_redirects(
    registry: Registry, scope: Scope, web: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A redirect of the hub leads to public addresses, to the hub's own host, or to what an entry names."""
    from huggingface_hub import constants

    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, web.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", web.url)
    Hub(web).publish(write_adapter(tmp_path / "a"), "c" * 40)
    with pytest.raises(InputError, match=rf"http://localhost:{web.port}.* not public"):
        await over_http(registry, scope, "hf://").register(LoadRequest("no", "hf://acme/sql-lora"), "test")
    lists, web.api = web.api, lambda _: None
    web.put("/api/models/acme/sql-lora", b"", location=f"http://localhost:{web.port}/lfs/list")
    with pytest.raises(InputError, match=rf"http://localhost:{web.port}.* not public"):
        await over_http(registry, scope, "hf://").register(LoadRequest("no", "hf://acme/sql-lora"), "test")
    web.api = lists
    asked = {path.partition("?")[0].rpartition("/")[0] for path, _, _ in web.asked}
    assert asked == {"/api/models/acme", f"/acme/sql-lora/resolve/{'c' * 40}"}
    http = over_http(registry, scope, "hf://", f"http://localhost:{web.port}")
    await http.register(LoadRequest("yes", "hf://acme/sql-lora"), "test")


async def test_where_credentials_go(registry: Registry, scope: Scope, web: WebServer, tmp_path: Path) -> None:
    """A replica sends a password or a token for a source's host to no other one, wherever it
    redirects."""
    web.put("/a.tar", b"", location=f"http://localhost:{web.port}/b.tar")
    web.put("/b.tar", tar_of(write_adapter(tmp_path / "a")))
    http = over_http(registry, scope, web.url, f"http://localhost:{web.port}")
    url = f"{web.url}/a.tar".replace("//", f"//me:{SECRET}@")
    await http.register(LoadRequest("good", url), "test")
    sent = base64.b64encode(f"me:{SECRET}".encode()).decode()
    assert {who for path, _, who in web.asked if path == "/a.tar"} == {f"Basic {sent}"}
    assert {who for path, _, who in web.asked if path == "/b.tar"} == {None}


async def test_what_is_unpacked(registry: Registry, scope: Scope, web: WebServer, tmp_path: Path) -> None:
    """Of an uploaded or fetched archive a replica writes only the files that it serves, none of them
    outside its folder."""
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
    loaded = await http.register(LoadRequest("fetched", web.put("/a.tar", tar_of(made))), "test")
    fetched = loaded.record
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
