"""Over HTTP: what may be fetched, how it is told meanwhile, and uploads; a real replica, a fake engine."""

from __future__ import annotations

import asyncio
import gzip
import json
import tarfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
import uvicorn

from lora_fs.sidecar.model import Quota
from lora_fs.sidecar.reconcile.assembly import Assembly, assemble
from lora_fs.sidecar.server.app import create_app
from lora_fs.sidecar.server.middleware.access import Admin
from lora_fs.sidecar.server.middleware.audit import Trail
from lora_fs.sidecar.settings import Settings
from lora_fs.sidecar.validate import Expectation
from tests.reconcile.conftest import FakeEngine
from tests.sources.conftest import CONFIG, WEIGHTS, Hub, WebServer, left_in, tar_of

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Sidecar:
    """One that listens."""

    def __init__(self, client: httpx.AsyncClient, assembly: Assembly, root: Path) -> None:
        self.http, self.assembly, self.root = client, assembly, root

    async def load(self, name: str, path: str, **more: Any) -> httpx.Response:
        return await self.http.post(
            "/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path, **more}
        )

    async def adapters(self) -> dict[str, Any]:
        answer = await self.http.get("/v1/lora_adapters")
        found: dict[str, Any] = answer.json()
        return found


Start = Callable[..., Any]


@pytest.fixture
async def sidecar(tmp_path: Path) -> AsyncIterator[Start]:
    """``await sidecar(allowed_remotes=…)``."""
    async with AsyncExitStack() as stack:

        async def start(**settings: Any) -> Sidecar:
            return await stack.enter_async_context(_running(tmp_path, settings))

        yield start


@asynccontextmanager
async def _running(tmp_path: Path, given: dict[str, Any]) -> AsyncIterator[Sidecar]:
    settings = Settings(
        **{"root": tmp_path / "volume", "model": "tiny", "stage_dir": tmp_path / "stage", **given},
        create=True,
    )
    assembly = await assemble(settings, Expectation(), FakeEngine())
    app = create_app(
        assembly.replica,
        engine_url="http://127.0.0.1:9",
        admin=Admin(settings.token_file, settings.public_namespaces, insecure="loopback"),
        trail=Trail(tmp_path / "audit"),
        background=assembly.running,
    )
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
    task = asyncio.create_task(server.serve())
    while not server.started or not assembly.replica.readiness().ready:
        await asyncio.sleep(0.01)
        assert not task.done(), task.result()
    port = server.servers[0].sockets[0].getsockname()[1]
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        yield Sidecar(client, assembly, settings.root or tmp_path)
    server.should_exit = True
    await task


async def test_a_load_from_the_hub(sidecar: Start, hub: Hub, adapter: Path) -> None:
    """It is fetched, registered with its commit, and loaded here."""
    hub.publish(adapter, "a" * 40)
    one = await sidecar(allowed_remotes=("hf://acme", f"http://localhost:{hub.web.port}"))
    answer = await one.load("sql", "hf://acme/sql-lora")
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'sql' added successfully.")
    (row,) = (await one.adapters())["data"]
    assert row["record"]["spec"]["source"] == {"uri": "hf://acme/sql-lora", "pin": "a" * 40}
    assert row["status"]["phase"] == "Ready"
    again = await one.load("sql", "hf://acme/sql-lora")
    assert (again.status_code, "already been loaded" in again.text) == (400, True)


async def test_nothing_is_fetched_that_is_not_allowed(
    sidecar: Start, web: WebServer, adapter: Path, tmp_path: Path
) -> None:
    """By default no request makes a replica ask another machine; no connection is made."""
    one = await sidecar()
    for uri in (web.put("/sql.tar", tar_of(adapter)), "hf://acme/sql-lora", "s3://loras/sql"):
        query = "?sig=hush4711" if uri.startswith("http") else ""
        user = "" if uri.startswith("s3") else "me:hush4711@"  # a bucket has none
        answer = await one.load("sql", uri.replace("//", f"//{user}") + query)
        assert (answer.status_code, "LORA_FS_ALLOWED_REMOTES" in answer.text) == (400, True), answer.text
        assert "hush4711" not in answer.text
    assert web.asked == []
    assert "hush4711" not in (tmp_path / "audit").read_text()


async def test_a_redirect_is_asked_of_again(sidecar: Start, web: WebServer, adapter: Path) -> None:
    """A server that is allowed makes the replica ask no other one."""
    web.put("/sql.tar", b"", location=f"http://localhost:{web.port}/stored.tar")
    web.put("/stored.tar", tar_of(adapter))
    one = await sidecar(allowed_remotes=(web.url,))
    answer = await one.load("sql", f"{web.url}/sql.tar")
    assert (answer.status_code, "redirects to" in answer.text) == (400, True), answer.text
    assert {path for path, _, _ in web.asked} == {"/sql.tar"}


async def test_a_long_download_is_told_and_goes_on(sidecar: Start, web: WebServer, large: Path) -> None:
    """The caller is told how far it is, the list and the status file say so; a repeat gets the outcome."""
    url = web.put("/large.tar", tar_of(large), stall=2_000_000)
    one = await sidecar(allowed_remotes=(web.url,), hold_timeout_s=0.5, resync_s=0.1)
    answer = await one.load("large", url)
    assert (answer.status_code, "It goes on: ask again" in answer.text) == (503, True), answer.text
    with anyio.fail_after(20):
        while True:
            (told,) = (await one.adapters())["downloads"]
            status = _status(one.root)
            if told["received_bytes"] and status.get("downloads"):
                break
            await asyncio.sleep(0.05)
    assert (told["name"], told["phase"], told["source"]) == ("large", "Downloading", url)
    assert told["size_bytes"] == len(web.files["/large.tar"])
    assert status["downloads"]["large"]["phase"] == "Downloading"
    web.odd["/large.tar"].stall = None
    web.go.set()
    with anyio.fail_after(30):
        while (answer := await one.load("large", url)).status_code == 503:
            pass  # it waits itself
    assert answer.status_code == 200, answer.text
    found = await one.adapters()
    assert ([row["name"] for row in found["data"]], found["downloads"]) == (["large"], [])


def _status(root: Path) -> dict[str, Any]:
    for path in (root / ".replicas").glob("*.json"):
        found: dict[str, Any] = json.loads(path.read_text())
        return found
    return {}


async def test_a_query_is_of_the_source(sidecar: Start, web: WebServer, adapter: Path, large: Path) -> None:
    """Dynamo's load of another one is no repeat, whether the server pins its files or not."""
    one = await sidecar(allowed_remotes=(web.url,))
    for name, etag in (("pinned", '"x"'), ("unpinned", "")):
        urls = [
            web.put(f"/{name}.tar?id={number}", tar_of(folder), etag=etag)
            for number, folder in enumerate((adapter, large))
        ]
        for url, status, told in (
            (urls[0], 200, "loaded successfully"),
            (urls[0], 200, "already loaded"),
            (urls[1], 400, "registered from another source"),
            (urls[0].partition("?")[0], 400, "registered from another source"),
            (urls[0].replace("//", "//me:hush4711@"), 400, "registered from another source"),
        ):
            body = {"lora_name": name, "source": {"uri": url}}
            answer = await one.http.post("/v1/loras", json=body)
            assert (answer.status_code, told in answer.text) == (status, True), answer.text
            assert "id=" not in answer.text


async def test_what_was_unloaded_meanwhile_is_fetched_again(
    sidecar: Start, web: WebServer, large: Path
) -> None:
    """The outcome that nobody fetched tells of what is not there any more."""
    url = web.put("/large.tar", tar_of(large), stall=2_000_000)
    one = await sidecar(allowed_remotes=(web.url,), hold_timeout_s=0.5, resync_s=0.1)
    assert (await one.load("large", url)).status_code == 503
    web.odd["/large.tar"].stall = None
    web.go.set()
    with anyio.fail_after(30):
        while True:
            if not (await one.adapters())["downloads"]:
                break
            await asyncio.sleep(0.05)
    answer = await one.http.post("/v1/unload_lora_adapter", json={"lora_name": "large"})
    assert answer.status_code == 200, answer.text
    with anyio.fail_after(30):
        while (answer := await one.load("large", url)).status_code == 503:
            pass
    assert answer.status_code == 200, answer.text
    assert [row["name"] for row in (await one.adapters())["data"]] == ["large"]


async def test_a_tenant_sees_its_own_downloads(
    sidecar: Start, web: WebServer, large: Path, tmp_path: Path
) -> None:
    """Of namespaces that a caller may not read nothing is told, neither of what is on its way there."""
    tokens = tmp_path / "tokens"
    tokens.write_text("all-4711 name=ops\n")
    url = web.put("/large.tar", tar_of(large), stall=1_000_000)
    one = await sidecar(
        allowed_remotes=(web.url,),
        namespaces=("team-a", "team-b"),
        public_namespaces=("team-a",),
        token_file=tokens,
        hold_timeout_s=0.2,
    )
    one.http.headers["Authorization"] = "Bearer all-4711"
    assert (await one.load("team-b/law", url)).status_code == 503
    assert [told["name"] for told in (await one.adapters())["downloads"]] == ["team-b/law"]
    del one.http.headers["Authorization"]
    assert (await one.adapters())["downloads"] == []


# -- uploads ---------------------------------------------------------------------------------------


TAR = {"Content-Type": "application/x-tar"}


async def test_a_tar_is_uploaded(sidecar: Start, adapter: Path) -> None:
    """It is registered, active, and served by the next request; the same again is no change."""
    one = await sidecar()
    for status in (201, 200):
        answer = await one.http.post(
            "/v1/lora_adapters?name=sql", content=tar_of(adapter, "w:gz"), headers=TAR
        )
        assert answer.status_code == status, answer.text
    body = answer.json()
    assert (body["name"], body["changed"], body["record"]["origin"]) == ("sql", False, "api")
    assert [row["name"] for row in (await one.adapters())["data"]] == ["sql"]
    assert left_in(one.root) == []


async def test_a_form_is_uploaded(sidecar: Start, large: Path) -> None:
    """Its files by their names, or a tar; a revision is named in the query."""
    one = await sidecar()
    files = {name: (name, (large / name).read_bytes()) for name in (CONFIG, WEIGHTS)}
    answer = await one.http.post("/v1/lora_adapters?name=large&revision=r7&activate=false", files=files)
    assert answer.status_code == 201, answer.text
    assert answer.json()["record"]["revision"] == "r7"
    placed = one.root / "default/tiny/r7/large"
    assert (placed / WEIGHTS).read_bytes() == (large / WEIGHTS).read_bytes()
    tar = {"file": ("large.tar", tar_of(large))}
    assert (await one.http.post("/v1/lora_adapters?name=tarred", files=tar)).status_code == 201
    assert left_in(one.root) == []


def _zeros(size_bytes: int) -> bytes:
    """A packed tar of so many."""
    member = tarfile.TarInfo(WEIGHTS)
    member.size = size_bytes
    return gzip.compress(member.tobuf() + bytes(size_bytes))


REFUSED: dict[str, tuple[dict[str, Any], int, str]] = {
    "name": ({"params": {"name": "../x"}, "content": b"x", "headers": TAR}, 400, "invalid name"),
    "revision": (
        {"params": {"name": "x", "revision": "a/b"}, "content": b"x", "headers": TAR},
        400,
        "revision",
    ),
    "no tar": ({"params": {"name": "x"}, "content": b"x" * 600, "headers": TAR}, 400, "is no tar"),
    "nothing": ({"params": {"name": "x"}, "content": b"", "headers": TAR}, 400, "nothing was sent"),
    "kind": ({"params": {"name": "x"}, "json": {}}, 400, "send the adapter as application/x-tar"),
    "other file": (
        {"params": {"name": "x"}, "files": {"a": ("run.py", b"x")}},
        400,
        "no file that is served",
    ),
    "other file, empty": (
        {"params": {"name": "x"}, "files": {"a": ("run.py", b"")}},
        400,
        "'run.py' is no file that is served",
    ),
    "field, empty": ({"params": {"name": "x"}, "files": {"a": ("", b"")}}, 400, "is no file"),
    "path": ({"params": {"name": "x"}, "files": {"a": (f"../../{CONFIG}", b"{}")}}, 422, "cannot be served"),
    "field": ({"params": {"name": "x"}, "files": {"a": ("", b"x")}}, 400, "is no file"),
    "twice": (
        {"params": {"name": "x"}, "files": [("a", (CONFIG, b"{")), ("b", (CONFIG, b"}"))]},
        400,
        f"'{CONFIG}' is sent twice",
    ),
    "two tars": (
        {"params": {"name": "x"}, "files": [("a", ("a.tar", b"x")), ("b", ("b.tar", b"y"))]},
        400,
        "a tar is sent twice",
    ),
    "a tar and more": (
        {"params": {"name": "x"}, "files": [("a", ("a.tar", b"x")), ("b", (CONFIG, b"{}"))]},
        400,
        "a tar is sent with another file",
    ),
    "more and a tar": (
        {"params": {"name": "x"}, "files": [("a", (CONFIG, b"{}")), ("b", ("a.tar", b"x"))]},
        400,
        "a tar is sent with another file",
    ),
    "kind beyond UTF-8": (
        {"params": {"name": "x"}, "content": b"x", "headers": {"Content-Type": b"text/\xff"}},
        400,
        "send the adapter as application/x-tar",
    ),
    "cut": (
        {
            "params": {"name": "x"},
            "content": b'--b\r\nContent-Disposition: form-data; filename="adapter_config.json"\r\n\r\n{',
            "headers": {"Content-Type": "multipart/form-data; boundary=b"},
        },
        400,
        "the form was cut",
    ),
    "large": ({"params": {"name": "x"}, "content": b"x" * 300_001, "headers": TAR}, 413, "300000 bytes"),
    "large inside": (
        {"params": {"name": "x"}, "content": _zeros(300_001), "headers": TAR},
        413,
        "300000 bytes",
    ),
}


@pytest.mark.parametrize("why", REFUSED)
async def test_an_upload_that_is_refused_leaves_nothing(why: str, sidecar: Start) -> None:
    """In a sentence, and in no file."""
    request, status, told = REFUSED[why]
    one = await sidecar(fetch_max_bytes=300_000)
    answer = await one.http.post("/v1/lora_adapters", **request)
    assert (answer.status_code, told in answer.text) == (status, True), answer.text
    assert str(one.root) not in answer.text, "where it lay meanwhile is not its sender's affair"
    assert left_in(one.root) == []


@pytest.mark.parametrize("lengthless", [False, True])
async def test_a_source_that_is_too_large_is_413(
    lengthless: bool, sidecar: Start, web: WebServer, large: Path
) -> None:
    """As an upload of its size is, whether the size is said beforehand or found as it is read."""
    one = await sidecar(fetch_max_bytes=300_000, allowed_remotes=(web.url,))
    url = web.put("/large.tar", tar_of(large), lengthless=lengthless, ranged=not lengthless)
    answer = await one.load("large", url)
    assert (answer.status_code, "LORA_FS_FETCH_MAX_BYTES" in answer.text) == (413, True), answer.text
    assert left_in(one.root) == []


async def test_an_upload_without_a_length_is_bounded_as_it_comes(sidecar: Start) -> None:
    """And nothing of it stays."""
    one = await sidecar(fetch_max_bytes=300_000)

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield bytes(64 << 10)

    answer = await one.http.post("/v1/lora_adapters?name=x", content=chunks(), headers=TAR)
    assert answer.status_code == 413, answer.text
    assert left_in(one.root) == []


async def test_who_may_not_register_sends_nothing(sidecar: Start, adapter: Path, tmp_path: Path) -> None:
    """401 without a token; the audit has the line."""
    tokens = tmp_path / "tokens"
    tokens.write_text("all-4711 name=ops\n")
    one = await sidecar(token_file=tokens)
    answer = await one.http.post("/v1/lora_adapters?name=sql", content=tar_of(adapter), headers=TAR)
    assert answer.status_code == 401
    given = {**TAR, "Authorization": "Bearer all-4711"}
    answer = await one.http.post("/v1/lora_adapters?name=sql", content=tar_of(adapter), headers=given)
    assert answer.status_code == 201, answer.text
    outcomes = [json.loads(line)["outcome"] for line in (tmp_path / "audit").read_text().splitlines()]
    assert outcomes == ["denied", "done"]


async def test_a_quota_is_asked_before_anything_is_taken(
    sidecar: Start, web: WebServer, large: Path, adapter: Path, tmp_path: Path
) -> None:
    """No byte is fetched of what would not fit, uploads leave nothing; the same bytes again are no growth."""
    one = await sidecar(allowed_remotes=(web.url,))
    upload = {"content": tar_of(adapter), "headers": TAR}
    assert (await one.http.post("/v1/lora_adapters?name=sql", **upload)).status_code == 201
    accounts = one.assembly.replica._registrations.registry.accounts
    accounts.write(Quota(namespace="default", adapters=1, size_bytes=5000, writer="test", updated_at=""))
    answer = await one.load("large", web.put("/large.tar", tar_of(large)))
    assert (answer.status_code, "lora-fs quota" in answer.text) == (403, True), answer.text
    assert web.bodies("/large.tar") == []
    answer = await one.http.post("/v1/lora_adapters?name=two", **upload)
    assert (answer.status_code, left_in(one.root)) == (403, []), answer.text
    assert (await one.http.post("/v1/lora_adapters?name=sql", **upload)).status_code == 200
